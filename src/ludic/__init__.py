"""Ludic: reinforcement learning of LLM agents, as a library of small replaceable parts.

The package root exports nothing on purpose: import the part you use, and pay only for that one
(`import ludic` loads neither torch nor transformers nor vllm).
"""

__version__ = "0.1.0"
