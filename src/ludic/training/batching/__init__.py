"""An older import path of batch generation: the names of `ludic.batch_gen`, imported when they are asked for.

That package is text here, as in `ludic.training`: neither of the two imports the other.
"""

import importlib
from typing import Any

_IN_PIPELINE = {"PipelineBatchSource", "run_pipeline_actor"}


def __getattr__(name: str) -> Any:
    home = "ludic_pipeline.queue" if name in _IN_PIPELINE else "ludic.batch_gen"
    return getattr(importlib.import_module(home), name)
