"""Starts a vLLM server that takes new weights; the code is in the plug-in `ludic_vllm`."""

from typing import TYPE_CHECKING

from ludic.plugins import forward

if TYPE_CHECKING:
    from ludic_vllm.vllm_server import *  # noqa: F403

__getattr__ = forward(__name__, "ludic_vllm.vllm_server")

if __name__ == "__main__":
    from ludic_vllm.vllm_server import main

    main()
