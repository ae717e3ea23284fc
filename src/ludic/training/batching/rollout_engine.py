"""An older import path of the rollout engine, which lives in `ludic.batch_gen.engine`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("ludic.batch_gen.engine"), name)
