"""The data folder of a Tinker server. Start with store.py; journal.py keeps requests, checkpoints.py saved weights."""
