"""Declarations of this plug-in: vLLM as an engine of `ludic serve`, `ludic gateway --server` and `ludic train`.

Entry points name them. Loads without torch and vLLM.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Engine
from ludic.run.resolve import ResolvedRun
from ludic.types import TeacherScorer

if TYPE_CHECKING:
    from ludic_vllm.client import VLLMChatClient


class _VLLMEngine:
    """Starts a server, and makes a client of one that runs."""

    def serve(self, flags: Sequence[str], *, insecure: bool) -> NoReturn:
        """Replace this process by the server."""
        from ludic_vllm.vllm_server import serve

        serve(flags, insecure=insecure)

    def client(self, url: str) -> "VLLMChatClient":
        from ludic_vllm.client import VLLMChatClient

        return VLLMChatClient(servers=[url])


VLLM = _VLLMEngine()


class _VLLMFeature(Engine):
    """vLLM servers, named or started for the run."""

    engine = "vllm"
    session = "ludic_vllm.generation:VLLMSession"

    def samples_on_servers(self, config: RunConfig) -> bool:
        return True

    def served_teacher(self, run: ResolvedRun, url: str, closing: ExitStack) -> TeacherScorer:
        """Scorer of samples by the model of a vLLM server."""
        from ludic_vllm.generation import connect_to_teacher  # loads torch

        return connect_to_teacher(run, url, closing)


ENGINE = _VLLMFeature()
