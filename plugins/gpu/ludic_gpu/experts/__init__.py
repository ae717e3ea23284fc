"""Mixtures of experts: routers recorded and replayed (routing.py), their load (load.py).

The embedded engine and the trainer import it.
"""

from ludic_gpu.experts.load import balance_loss, load_counts, load_stats
from ludic_gpu.experts.routing import UNKNOWN, RouterPass, Routers, recording, replaying

__all__ = ["UNKNOWN", "RouterPass", "Routers", "balance_loss", "load_counts", "load_stats", "recording", "replaying"]
