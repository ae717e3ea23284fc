"""Getting new weights to whatever serves the policy."""

from ludic.distributed.adapter_publisher import VllmAdapterPublisher
from ludic.distributed.broadcast import BroadcastPolicyPublisher
from ludic.distributed.client_publisher import ClientPublisher
from ludic.distributed.folder_weights import FolderFollower, FolderPublisher
from ludic.distributed.interfaces import ControlPlane, TensorCommunicator, WeightPushError
from ludic.distributed.rank0 import Rank0OnlyPublisher
from ludic.distributed.shared_weights import SharedWeightsPublisher
from ludic.distributed.tinker_policy import TinkerPolicy
from ludic.distributed.vllm_control import VllmControlPlane
from ludic.distributed.vllm_publisher import create_vllm_publisher
from ludic.inference.vllm_buckets import WeightMetadata

InProcessPublisher = SharedWeightsPublisher
"""The embedded engine holds the trainer's own parameters; this is the name of the documents for it."""

__all__ = [
    "SharedWeightsPublisher", "InProcessPublisher", "BroadcastPolicyPublisher", "Rank0OnlyPublisher",
    "ClientPublisher", "FolderPublisher", "FolderFollower",
    "ControlPlane", "TensorCommunicator", "WeightMetadata", "WeightPushError",
    "VllmControlPlane", "VllmAdapterPublisher", "create_vllm_publisher", "TinkerPolicy",
]  # fmt: skip
