"""The interfaces of weight publishing, under the path of an earlier version."""

from ludic.distributed.interfaces import *  # noqa: F403
from ludic.types import PolicyPublisher

__all__ = ["ControlPlane", "PolicyPublisher", "TensorCommunicator"]  # noqa: F405
