"""Training and sampling through the Tinker service: client, chat template, published policy, trainer.

`run` and `minimal` may import it; it stands on `training`, `inference` and `distributed`. Start with trainer.py.
"""
