"""Servers of OpenEnv as envs (`env`, `actions`, `connection`).

Its training traces are read by ludic.batch_gen.training_traces.
"""

from ludic_envs.adapters.openenv.connection import OpenEnvError
from ludic_envs.adapters.openenv.env import OpenEnvEnv

__all__ = ["OpenEnvEnv", "OpenEnvError"]
