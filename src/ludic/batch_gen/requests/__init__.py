"""Rollout requests: which tasks are played next, with which seeds, how often, and in which role.

`batch_gen.sources`, `run` and `eval` import it. Start with dataset.py.
"""
