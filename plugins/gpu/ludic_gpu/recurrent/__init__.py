"""Hybrid models: recurrent layers (gated delta nets, Mamba, short convolutions) beside attention. Start with layers.py."""

from ludic_gpu.recurrent.layers import mix_of, route_recurrence
from ludic_gpu.recurrent.packed import HybridSequences

__all__ = ["HybridSequences", "mix_of", "route_recurrence"]
