"""One model on several ranks (FSDP2, tensor parallel), and the ways in which new weights reach the samplers.

`training`, `tinker` and `run` import it; it imports `inference` and `models`. Start with ranks.py and fsdp.py, or
publisher.py and publish/.
"""

import importlib
from typing import Any

from ludic.distributed.publish.adapter import VllmAdapterPublisher
from ludic.distributed.publish.folder import FolderFollower, FolderPublisher
from ludic.distributed.publish.interfaces import ControlPlane, TensorCommunicator, WeightPushError
from ludic.distributed.publish.vllm import create_vllm_publisher
from ludic.distributed.publish.vllm_control import VllmControlPlane
from ludic.distributed.publisher import (
    BroadcastPolicyPublisher,
    ClientPublisher,
    Rank0OnlyPublisher,
    SharedWeightsPublisher,
)
from ludic.inference.vllm.transfer import WeightMetadata

InProcessPublisher = SharedWeightsPublisher
"""The documents' name for it: the embedded inference engine holds the trainer's own parameters."""

__all__ = [
    "SharedWeightsPublisher", "InProcessPublisher", "BroadcastPolicyPublisher", "Rank0OnlyPublisher",
    "ClientPublisher", "FolderPublisher", "FolderFollower",
    "ControlPlane", "TensorCommunicator", "WeightMetadata", "WeightPushError",
    "VllmControlPlane", "VllmAdapterPublisher", "create_vllm_publisher", "TinkerPolicy",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load it lazily: `ludic.tinker` imports this package."""
    if name != "TinkerPolicy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("ludic.tinker.policy").TinkerPolicy
