"""Checkpoints: what a run writes to resume from, how it is checked and read back, and how a model is exported.

`training`, `tinker`, `run` and `cli` import it. Start with manager.py; the other files are one kind of file each.
"""

from typing import TYPE_CHECKING

from ludic.training.config import CheckpointConfig
from ludic.util.lazy import lazy

if TYPE_CHECKING:
    from ludic.training.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointConfig", "CheckpointManager"]

__getattr__ = lazy(__name__, {"manager": "CheckpointManager"})  # it loads torch
