"""The gateway: an unchanged agent talks to a model API over HTTP, and every call becomes part of a rollout.

`run` and `cli` import it; it imports interaction, inference and what is below. Loads without torch. Start with forest.py (where a
request continues), then session.py, server.py and wire/ (one file per API dialect).
"""
