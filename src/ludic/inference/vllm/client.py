"""The client of a vLLM server; the code is in the plug-in `ludic_vllm`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward

if TYPE_CHECKING:
    from ludic_vllm.client import *  # noqa: F403

__getattr__ = forward(__name__, "ludic_vllm.client")
