"""OpenEnv, in both directions: its servers as envs (`env`, `actions`, `connection`), and our envs served in its protocol
(`server`, `session`).

Its training traces are read by ludic.batch_gen.training_traces.
"""

from ludic.envs.adapters.openenv.connection import OpenEnvError
from ludic.envs.adapters.openenv.env import OpenEnvEnv

__all__ = ["OpenEnvEnv", "OpenEnvError"]
