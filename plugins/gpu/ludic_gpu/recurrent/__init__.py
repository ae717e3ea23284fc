"""Hybrid models: recurrent layers (gated delta nets, Mamba, short convolutions) beside attention. Start with layers.py."""
