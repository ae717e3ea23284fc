"""Generated text adventures of TextWorld.

env.py is the environment, games.py generates and runs games with the package's logic, narrator.py writes what the player sees.
"""

from ludic_envs.adapters.textworld.env import TextWorldEnv

__all__ = ["TextWorldEnv"]
