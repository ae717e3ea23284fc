"""Commands that serve: a model, a gateway to it, environments, sandboxes."""
