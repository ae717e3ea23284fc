"""`ludic view`: the rollouts, tokens and metrics of runs, in a browser. It reads run folders and never writes into them.

index.py finds runs and keeps an index of their rollout files, tokens.py joins rollouts with what the trainer computed, api.py
answers as plain dicts, health.py says what looks wrong, server.py serves it; page/ is the page and export.py makes one file of it.
"""
