"""Models with recurrent layers (gated delta nets, Mamba, short convolutions) in the engine. Start with `states`."""
