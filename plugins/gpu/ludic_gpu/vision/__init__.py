"""Vision-language models: pictures as embeddings among those of the tokens (inputs.py), small random ones (tiny.py)."""
