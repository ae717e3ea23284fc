"""Checkpoints: what a run writes to go on from, how it is checked and read back, and how a model is exported.

`training`, `tinker`, `run` and `cli` import it. Start with manager.py (the only rank), then sharded.py (several ranks).
"""

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager

__all__ = ["CheckpointConfig", "CheckpointManager"]
