"""vLLM: the client for its server, the routing over several servers, and the process that runs it.

`distributed.publish` and `run` import it; loads without vllm installed. Start with client.py, then process.py.
"""
