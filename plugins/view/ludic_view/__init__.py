"""`ludic view`: the rollouts, tokens and metrics of runs, in a browser. It reads run folders and never writes into them.

files.py follows one file of a run and knows a card of each rollout, index.py finds runs and joins their files, tokens.py joins
rollouts with what the trainer computed. api.py answers as plain dicts, with queries.py (which rollouts) and rollouts.py (rollouts,
groups, tasks); health.py says what looks wrong, server.py serves it; page/ is the page and export.py makes one file of it. plot.py
draws metrics, records.py reads the trainer's records.
"""
