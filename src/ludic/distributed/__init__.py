"""One model on several ranks (FSDP2), and the ways in which new weights reach the samplers.

`training` and `run` import it. Start with ranks.py and fsdp.py, or publisher.py and folder.py.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic.distributed.folder import FolderFollower, FolderPublisher
    from ludic.distributed.interfaces import ControlPlane, TensorCommunicator, WeightPushError
    from ludic.distributed.publisher import (
        BroadcastPolicyPublisher,
        ClientPublisher,
        InProcessPublisher,
        Rank0OnlyPublisher,
        SharedWeightsPublisher,
    )
    from ludic.distributed.transfer import WeightMetadata
    from ludic_tinker.policy import TinkerPolicy
    from ludic_vllm.publish.adapter import VllmAdapterPublisher
    from ludic_vllm.publish.control import VllmControlPlane
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
        "interfaces": "ControlPlane TensorCommunicator WeightPushError",
        "publisher": "BroadcastPolicyPublisher ClientPublisher InProcessPublisher Rank0OnlyPublisher SharedWeightsPublisher",
        "transfer": "WeightMetadata",
        "ludic_vllm.publish.adapter": "VllmAdapterPublisher",
        "ludic_vllm.publish.control": "VllmControlPlane",
        "ludic_vllm.publish.vllm": "create_vllm_publisher",
        "ludic_tinker.policy": "TinkerPolicy",
    },
)
