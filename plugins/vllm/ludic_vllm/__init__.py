"""vLLM: the client for its server, the routing over several servers, the process that runs it, and the code inside it.

`ludic_pipeline` imports it. It loads without vllm installed: only vLLM imports inside/. publish/ sends weights to servers.
Start with client.py, then process.py.
"""
