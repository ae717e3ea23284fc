"""Parts of an HTTP server: start, end, limits, errors, and of models: request bodies, OpenAI-shaped replies. Loads without torch.

`inference.local.server` (`ludic serve`), `tinker.server`, `gateway`, `sandbox.remote` and `view` import it. Start with app.py.
"""
