"""Several policies that learn in one run of `ludic train`, each with its model, algorithm, optimizer and checkpoints.

entry.py: the tables `[policies.NAME]` and the flag `--policy`. resolve.py: each policy's settings, and who plays which role.
team.py: models, engines, episodes and trainers. See docs/multi_policy.md.
"""
