"""The engine on a CPU: `runner` (prompts by spans, decoding by rows) and `rows` (keys and values of the decoding sequences)."""
