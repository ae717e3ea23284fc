"""Checkpoints: what is saved, how a file becomes complete or stays absent, how a run goes on, how a model is exported.

`training`, `tinker`, `run` and `cli` import it. Start with manager.py (one process), then sharded.py (several ranks).
"""

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager

__all__ = ["CheckpointConfig", "CheckpointManager"]
