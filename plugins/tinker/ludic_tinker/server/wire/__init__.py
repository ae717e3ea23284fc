"""The protocol's messages: JSON bodies (bodies.py), and protobuf for training data and results (messages.py)."""
