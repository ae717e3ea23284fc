"""Adapters for environments of other packages: one small file per package, each behind an extra of its name.

Made by id (`registry.envs.make("gymnasium", env_id="Taxi-v4")`); nothing is imported here. Start with gymnasium.py; what they share
is in replayed.py and plain.py.
"""
