"""Mixtures of experts: routers recorded and replayed (routing.py), their load (load.py), LoRA on experts (adapters.py)."""

from ludic_gpu.experts.adapters import expert_parameters, merge_experts
from ludic_gpu.experts.load import ExpertLoad, balance_loss, load_counts, load_stats
from ludic_gpu.experts.routing import UNKNOWN, RouterPass, Routers, recording, replaying

__all__ = [
    "UNKNOWN",
    "ExpertLoad",
    "RouterPass",
    "Routers",
    "balance_loss",
    "expert_parameters",
    "load_counts",
    "load_stats",
    "merge_experts",
    "recording",
    "replaying",
]
