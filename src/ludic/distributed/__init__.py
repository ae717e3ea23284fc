"""One model on several ranks (FSDP2, tensor parallel), and in publish/ the ways new weights reach what samples.

`training`, `tinker` and `run` import it; it imports `inference` and `models`. Start with ranks.py and fsdp.py, or publish/.
"""

import importlib
from typing import Any

from ludic.distributed.publish.adapter import VllmAdapterPublisher
from ludic.distributed.publish.folder import FolderFollower, FolderPublisher
from ludic.distributed.publish.in_process import ClientPublisher, Rank0OnlyPublisher, SharedWeightsPublisher
from ludic.distributed.publish.interfaces import ControlPlane, TensorCommunicator, WeightPushError
from ludic.distributed.publish.push import BroadcastPolicyPublisher
from ludic.distributed.publish.vllm import create_vllm_publisher
from ludic.distributed.publish.vllm_control import VllmControlPlane
from ludic.inference.vllm.buckets import WeightMetadata

InProcessPublisher = SharedWeightsPublisher
"""The documents' name for it: the embedded engine holds the trainer's own parameters."""

__all__ = [
    "SharedWeightsPublisher", "InProcessPublisher", "BroadcastPolicyPublisher", "Rank0OnlyPublisher",
    "ClientPublisher", "FolderPublisher", "FolderFollower",
    "ControlPlane", "TensorCommunicator", "WeightMetadata", "WeightPushError",
    "VllmControlPlane", "VllmAdapterPublisher", "create_vllm_publisher", "TinkerPolicy",
]  # fmt: skip

_ABOVE = {"TinkerPolicy": "ludic.tinker.policy"}


def __getattr__(name: str) -> Any:
    """Load Tinker's names lazily: they live above this package."""
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ABOVE[name]), name)
