"""Ludic: reinforcement learning of LLM agents, as a library of small replaceable parts.

The package root exports nothing but `ludic.run`, which makes whole runs: import the part you use, and pay only for that one
(`import ludic` loads neither torch nor transformers nor vllm).
"""

import importlib
from types import ModuleType

__version__ = "0.2.0"


def __getattr__(name: str) -> ModuleType:
    if name != "run":
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; import ludic.{name} if there is such a part"
        )
    return importlib.import_module("ludic.run")
