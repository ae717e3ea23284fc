"""Weight publishing to other processes: vLLM servers and folders.

`training`, `tinker` and `run` import it. Start with interfaces.py and ../publisher.py, then vllm.py or folder.py.
"""
