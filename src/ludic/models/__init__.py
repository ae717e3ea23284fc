"""Models: the torch code that the engine and the trainer share. Import the modules you need; this one is light."""

SMOLLM2, TINY = "smollm2-135m", "tiny"
"""Models that `load_model` knows by name."""
