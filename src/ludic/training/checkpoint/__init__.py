"""Checkpoints: what a run writes to resume from, how it is checked and read back, and how a model is exported.

`training`, `tinker`, `run` and `cli` import it. Start with manager.py; the other files are one kind of file each.
"""

from typing import TYPE_CHECKING, Any

from ludic.training.config import CheckpointConfig

if TYPE_CHECKING:
    from ludic.training.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointConfig", "CheckpointManager"]


def __getattr__(name: str) -> Any:
    """`CheckpointManager` loads torch, so it is imported when it is asked for."""
    if name != "CheckpointManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ludic.training.checkpoint.manager import CheckpointManager

    return CheckpointManager
