"""Other people's environments as ours: one small file per package, each behind an extra of its name.

Nothing is imported here; make them by id (`registry.envs.make("gymnasium", env_id="Taxi-v4")`) or import the one that
you need. What they share is in replayed.py and plain.py.
"""
