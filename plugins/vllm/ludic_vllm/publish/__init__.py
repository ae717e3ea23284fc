"""New weights for vLLM servers: all of them (vllm.py) or an adapter (adapter.py).

broadcast.py pushes a version and checks it, by the two interfaces of interfaces.py; control.py directs the servers, and
transfer.py is what trainer and workers share.
"""
