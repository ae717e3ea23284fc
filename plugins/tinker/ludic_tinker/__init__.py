"""Training and sampling through the Tinker service: client, chat template, published policy, learner and trainer.

`run` and `minimal` may import it; it imports `training`, `inference` and `distributed`. Start with learner.py.
"""
