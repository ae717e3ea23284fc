"""Weight publishing: how new weights reach the engine or the servers that sample.

`training`, `tinker` and `run` import it. Start with interfaces.py, then in_process.py (one process) or vllm.py (servers).
"""
