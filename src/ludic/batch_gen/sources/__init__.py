"""Batch sources: where the trainer's next batch comes from (fresh rollouts, a file, a replay buffer, a mixture, a teacher).

`training` sees them through the `BatchSource` interface only; `run` builds them. Start with rollouts.py.
"""
