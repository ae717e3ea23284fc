"""New weights for vLLM servers: all of them (vllm.py) or an adapter (adapter.py); control.py directs the servers."""
