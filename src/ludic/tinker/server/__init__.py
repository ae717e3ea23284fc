"""A server that speaks the Tinker protocol: many training runs with LoRA adapters over one frozen base model.

`ludic serve --tinker` starts it. Start with runs.py (training) and losses.py.
"""
