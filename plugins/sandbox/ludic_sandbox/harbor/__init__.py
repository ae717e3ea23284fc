"""Tasks of Harbor and Terminal-Bench: read task.py (the format), workspace.py (where commands run), grading.py, then env.py.

family.py generates such tasks from seeds; containers.py runs them in podman or docker.
"""

from ludic_sandbox.harbor.env import HarborEnv
from ludic_sandbox.harbor.family import HarborFamilyEnv
from ludic_sandbox.harbor.task import HarborTask, find_tasks

__all__ = ["HarborEnv", "HarborFamilyEnv", "HarborTask", "find_tasks"]
