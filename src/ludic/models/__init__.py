"""Models: the torch code that the embedded inference engine and the trainer share: loading, attention, log-probs, LoRA.

`inference.local`, `distributed`, `training` and `run` import it; this module itself is light. Start with loading.py, then head.py.
"""

SMOLLM2, TINY = "smollm2-135m", "tiny"
"""Models that `load_model` knows by name."""
