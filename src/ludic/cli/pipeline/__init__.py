"""The commands of a run on many processes: `ludic actor`, `ludic launch`, the supervisor that restarts what dies.

Only `cli.main` imports it. Start with launch.py, then supervisor.py.
"""
