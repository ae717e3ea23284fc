"""The learner: turns a batch of samples into one update of the weights, on one process or on many ranks.

`ludic.training.trainer` uses it; `tinker` and `run` may. Start with gradients.py (the update), then packing.py (the batch).
"""
