"""Parts of an HTTP server of models: request bodies, OpenAI-shaped replies, limits, errors. Loads without torch.

`inference.local.server` (`ludic serve`) and `gateway` import it. Start with request.py.
"""
