"""The seeds' import path of the publishers, which live in `publish/`."""

from ludic.distributed.publish.in_process import Rank0OnlyPublisher
from ludic.distributed.publish.push import BroadcastPolicyPublisher
from ludic.types import PolicyPublisher

__all__ = ["PolicyPublisher", "BroadcastPolicyPublisher", "Rank0OnlyPublisher"]
