"""New weights for vLLM servers: all of them (vllm.py) or an adapter (adapter.py).

broadcast.py pushes a version and checks it, by two interfaces; control.py directs the servers, vllm.py and adapter.py send the
bytes, and transfer.py is shared by trainer and workers.
"""
