"""The embedded engine on a CPU: `runner` (prompts by spans, decoding by rows), `rows` (keys and values of the decoding sequences)
and `recurrent` (hybrids: a state per sequence beside the block cache)."""
