"""The commands of a run on many processes: `ludic actor`, `ludic launch`, the supervisor that restarts dead processes.

Only `cli.main` imports it. Start with launch.py, then supervisor.py.
"""
