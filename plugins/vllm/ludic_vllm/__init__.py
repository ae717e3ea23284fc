"""vLLM: the client for its server, the routing over several servers, the process that runs it, and the code inside it.

`distributed.publish` and `run` import it; loads without vllm installed. Only vLLM imports worker.py and logits_processor.py.
Start with client.py, then process.py.
"""
