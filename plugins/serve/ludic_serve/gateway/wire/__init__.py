"""The HTTP dialects: a body becomes a `ModelRequest`, a `Reply` becomes JSON or events. Start with canonical.py."""
