"""The OpenAI-compatible HTTP server of the embedded engine (`ludic serve`): request bodies, replies, limits.

Only `cli` starts it. Start with server.py.
"""
