"""What this plug-in adds: ways to run a model in the embedded engine, forward passes, and parts for special kinds of models.

Entry points name attributes of this module. Each is imported when it is asked for, since some need triton.
"""

import importlib
from typing import Any

_MODULES = {
    "experts": "ludic_gpu.experts",
    "head_kernels": "ludic_gpu.head_kernels",
    "offload": "ludic_gpu.memory.offload",
    "quantized": "ludic_gpu.memory.quantized",
    "recurrent": "ludic_gpu.recurrent",
    "sliced": "ludic_gpu.context_parallel",
    "vision": "ludic_gpu.vision",
}
"""Part (`ludic.models.kinds.PARTS`) → the module that does it."""
_CLASSES = {
    "CUDABackend": "ludic_gpu.cuda.backend",
    "FusedPass": "ludic_gpu.passes",
    "HybridBackend": "ludic_gpu.hybrids.runners",
    "HybridPass": "ludic_gpu.passes",
    "SlicedPass": "ludic_gpu.passes",
    "VisionBackend": "ludic_gpu.vision.engine",
    "VisionPass": "ludic_gpu.passes",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module 'ludic_gpu.plugin' has no attribute {name!r}")
