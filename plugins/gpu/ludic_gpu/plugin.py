"""The parts of this plug-in for special kinds of models (`ludic.models.kinds`), as names for entry points.

Each is a module, imported on first use, since some need triton. Backends and forward passes are named where they are.
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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'ludic_gpu.plugin' has no attribute {name!r}")
