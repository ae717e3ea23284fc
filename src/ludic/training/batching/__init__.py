"""An older import path of batch generation: the names of `ludic.batch_gen`, imported when they are asked for.

That package is text here, as in `ludic.training`: neither of the two imports the other.
"""

from collections.abc import Callable
from typing import Any

from ludic.util.lazy import forward

_IN_PIPELINE = {"PipelineBatchSource", "run_pipeline_actor"}
_HOMES: dict[bool, Callable[[str], Any]] = {
    True: forward(__name__, "ludic_pipeline.queue"),
    False: forward(__name__, "ludic.batch_gen"),
}


def __getattr__(name: str) -> Any:
    return _HOMES[name in _IN_PIPELINE](name)
