"""What this plug-in adds: ways to run a model in the embedded engine, and parts for special kinds of models.

Entry points name attributes of this module. Each is imported when it is asked for, since some need triton.
"""

import importlib
from typing import Any

_MODULES = {
    "experts": "ludic_gpu.experts",
    "head_kernels": "ludic_gpu.head_kernels",
    "quantized": "ludic_gpu.memory.quantized",
    "recurrent": "ludic_gpu.recurrent",
    "vision": "ludic_gpu.vision",
}
"""Part (`ludic.models.kinds.PARTS`) → the module that does it."""
_CLASSES = {
    "CUDABackend": "ludic_gpu.cuda.backend",
    "HybridBackend": "ludic_gpu.hybrids.runners",
    "VisionBackend": "ludic_gpu.vision.engine",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module 'ludic_gpu.plugin' has no attribute {name!r}")
