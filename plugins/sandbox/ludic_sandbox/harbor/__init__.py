"""Tasks of Harbor and Terminal-Bench: read task.py (the format), workspace.py (where commands run), grading.py, then env.py.

containers.py runs them in podman or docker; examples/harbor_tasks/family.py generates tasks from seeds.
"""

from ludic_sandbox.harbor.env import HarborEnv
from ludic_sandbox.harbor.task import HarborTask, find_tasks

__all__ = ["HarborEnv", "HarborTask", "find_tasks"]
