"""A training run as a library part: settings, model, environment, folder, and the objects that a run consists of.

`cli`, examples and notebooks import it; it may import everything but `cli` and `minimal`. Start with config.py, then build.py.
"""
