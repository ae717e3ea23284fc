"""The interfaces of weight publishing; the code is in the plug-in `ludic_vllm`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward
from ludic.types import PolicyPublisher

if TYPE_CHECKING:
    from ludic_vllm.publish.broadcast import ControlPlane, TensorCommunicator

__all__ = ["ControlPlane", "PolicyPublisher", "TensorCommunicator"]

__getattr__ = forward(__name__, "ludic_vllm.publish.broadcast")
