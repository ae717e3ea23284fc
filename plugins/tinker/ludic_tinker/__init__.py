"""Training and sampling through the Tinker service: client, chat template, published policy, learner and trainer.

Start with learner.py; server/ runs the service's programs on hardware of yours.
"""
