"""The learner: turns a batch of samples into one update of the weights, on one process or on many ranks.

`ludic.training.trainer` uses it; `tinker` and `run` may. Start with interface.py (what a learner does), then torch_learner.py
(the update, phase by phase), gradients.py and packing.py.
"""
