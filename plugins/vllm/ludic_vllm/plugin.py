"""Declarations of this plug-in: vLLM as an engine of `ludic serve` and of `ludic gateway --server`. Entry points name them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ludic_vllm.client import VLLMChatClient


class VLLMEngine:
    """Starts a server, and makes a client of one that runs."""

    def serve(self, flags: Sequence[str], *, insecure: bool) -> NoReturn:
        """Replace this process by the server."""
        from ludic_vllm.vllm_server import serve

        serve(flags, insecure=insecure)

    def client(self, url: str) -> "VLLMChatClient":
        from ludic_vllm.client import VLLMChatClient

        return VLLMChatClient(servers=[url])


VLLM = VLLMEngine()
