"""Rollout requests: which tasks run next, with which seeds, how often, and in which role.

`batch_gen.sources`, `run` and `eval` import it. Start with dataset.py.
"""
