"""The `ludic` command. It may import everything; nobody imports it."""
