"""`ludic view`: the rollouts, tokens and metrics of runs, in a browser. It reads run folders and never writes into them.

cards.py knows a rollout without its tokens, files.py follows the files of a run, index.py finds runs and joins their files,
tokens.py joins rollouts with what the trainer computed. api.py answers as plain dicts, with queries.py (which rollouts), groups.py
and rollouts.py; health.py says what looks wrong, server.py serves it; page/ is the page and export.py makes one file of it.
"""
