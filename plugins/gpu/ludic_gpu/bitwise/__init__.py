"""Bitwise mode: one forward pass for sampler and trainer, in which a token's log-probability has the same bits in any batch.

`inference.local.bitwise` and `training.learner.policy` import it. Start with decoder.py; products.py says why it holds and tests
it on the machine, attention.py and rows.py are the other parts, head.py gives the trainer log-probabilities with gradients.
"""
