"""The seeds' path of the publishers; each lives in the file of its name."""

from ludic.distributed.broadcast import BroadcastPolicyPublisher
from ludic.distributed.rank0 import Rank0OnlyPublisher
from ludic.types import PolicyPublisher

__all__ = ["PolicyPublisher", "BroadcastPolicyPublisher", "Rank0OnlyPublisher"]
