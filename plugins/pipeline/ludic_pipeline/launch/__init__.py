"""The commands of a run on many processes, `ludic launch` and `ludic actor`. Start with launch.py, then supervisor.py.

Here a *role* is a kind of process (Redis, server, learner, actor), never a player of an env. This package starts and restarts the
processes; `ludic_pipeline.queue` is the queue between them, and `ludic_pipeline.generation` the learner's end of it.
"""
