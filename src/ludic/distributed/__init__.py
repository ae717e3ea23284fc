"""One model on several ranks (FSDP2), and the ways in which new weights reach the samplers.

`training` and `run` import it; it imports `models` and `inference`. Start with ranks.py and fsdp.py, or publisher.py and folder.py.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic.distributed.folder import FolderFollower, FolderPublisher
    from ludic.distributed.publisher import (
        ClientPublisher,
        InProcessPublisher,
        Rank0OnlyPublisher,
        SharedWeightsPublisher,
        WeightPushError,
    )
    from ludic_tinker.policy import TinkerPolicy
    from ludic_vllm.publish.adapter import VllmAdapterPublisher
    from ludic_vllm.publish.broadcast import BroadcastPolicyPublisher, ControlPlane, TensorCommunicator
    from ludic_vllm.publish.control import VllmControlPlane
    from ludic_vllm.publish.transfer import WeightMetadata
    from ludic_vllm.publish.vllm import create_vllm_publisher

__all__ = [
    "SharedWeightsPublisher", "InProcessPublisher", "BroadcastPolicyPublisher", "Rank0OnlyPublisher",
    "ClientPublisher", "FolderPublisher", "FolderFollower",
    "ControlPlane", "TensorCommunicator", "WeightMetadata", "WeightPushError",
    "VllmControlPlane", "VllmAdapterPublisher", "create_vllm_publisher", "TinkerPolicy",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "folder": "FolderFollower FolderPublisher",
        "publisher": "ClientPublisher InProcessPublisher Rank0OnlyPublisher SharedWeightsPublisher WeightPushError",
        "ludic_vllm.publish.adapter": "VllmAdapterPublisher",
        "ludic_vllm.publish.broadcast": "BroadcastPolicyPublisher ControlPlane TensorCommunicator",
        "ludic_vllm.publish.control": "VllmControlPlane",
        "ludic_vllm.publish.transfer": "WeightMetadata",
        "ludic_vllm.publish.vllm": "create_vllm_publisher",
        "ludic_tinker.policy": "TinkerPolicy",
    },
)
