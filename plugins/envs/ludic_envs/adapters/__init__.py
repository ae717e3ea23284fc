"""Adapters for environments of other packages: one file per package, each behind an extra of its name.

Made by id (`registry.envs.make("gymnasium", env_id="Taxi-v4")`); nothing is imported here. Start with gymnasium.py. base.py
is shared by all, sums_taskset.py is an example for verifiers.py.
"""
