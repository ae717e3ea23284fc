"""Tasks of Harbor and Terminal-Bench: read task.py (the format), workspace.py (where commands run), grading.py, then env.py.

family.py generates such tasks from seeds; containers.py runs them in podman or docker.
"""

from ludic.envs.harbor.env import HarborEnv
from ludic.envs.harbor.family import HarborFamilyEnv
from ludic.envs.harbor.task import HarborTask, find_tasks

__all__ = ["HarborEnv", "HarborFamilyEnv", "HarborTask", "find_tasks"]
