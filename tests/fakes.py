"""Real implementations of Ludic's interfaces that need no model: fakes, not mocks.

ScriptedClient (from the library) says what it is told. RandomTokenClient samples from a small fixed bigram model
and reports true log-probabilities. CountingEnv is the smallest env with more than one turn.
"""

import asyncio
import http.client
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.parsers import xml_tag_parser
from ludic.types import ChatResponse, Info, StepOutcome, TokenCompletionRequest, VersionRun

__all__ = ["CountingEnv", "RandomTokenClient", "RecordingClient", "ScriptedClient", "make_agent", "status_with_header"]


class RecordingClient:
    """Passes requests on and keeps what the server saw and sampled: the ground truth of token exactness."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[tuple[list[int], list[int]]] = []
        self.requests: list[TokenCompletionRequest] = []

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        prompt = request.prompt_token_ids.tolist()
        response, info = await self.inner.complete_tokens(request)
        self.calls.append((prompt, np.asarray(response.completion_token_ids).tolist()))
        self.requests.append(request)
        return response, info

    def sync_weights(self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: Any = None) -> str:
        raise RuntimeError("not served")


class RandomTokenClient:
    """Samples token by token from softmax(table[previous token] / temperature), with the request's own seed."""

    def __init__(
        self, *, vocab_size: int, end_ids: tuple[int, ...], decode: Callable[[list[int]], str], table_seed: int = 0
    ) -> None:
        rng = np.random.default_rng(table_seed)
        self.table_VV = rng.normal(size=(vocab_size, vocab_size))
        self.end_ids = end_ids
        self.decode = decode
        self.version = 3

    def logprobs(self, previous: int, temperature: float) -> np.ndarray:
        scaled_V = self.table_VV[previous] / temperature
        return scaled_V - np.logaddexp.reduce(scaled_V)

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        rng = np.random.default_rng(request.seed)
        previous = int(request.prompt_token_ids[-1])
        ids: list[int] = []
        chosen: list[float] = []
        finish_reason = "length"
        while len(ids) < request.sampling.max_tokens:
            logprobs_V = self.logprobs(previous, request.sampling.temperature)
            previous = int(rng.choice(len(logprobs_V), p=np.exp(logprobs_V)))
            ids.append(previous)
            chosen.append(float(logprobs_V[previous]))
            if previous in self.end_ids:
                finish_reason = "stop"
                break
        response = ChatResponse(
            text=self.decode(ids),
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=np.array(ids, dtype=np.int32),
            completion_logprobs=chosen,
            finish_reason=finish_reason,
            version_runs=(VersionRun(self.version, len(ids)),),
        )
        return response, {}

    def sync_weights(self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: Any = None) -> str:
        raise RuntimeError("a random client has no weights")


class CountingEnv(SingleAgentEnv):
    """Say "inc" until the count reaches the target; anything else is answered with a shrug."""

    def __init__(self, target: int = 3) -> None:
        super().__init__()
        self.target = target
        self.count = 0

    @property
    def suggested_sysprompt(self) -> str:
        return "Say inc."

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        self.count = 0
        return "count=0", {}

    def env_step(self, action: str) -> StepOutcome:
        self.count += action == "inc"
        done = self.count >= self.target
        return StepOutcome(
            f"count={self.count}", float(done), truncated=False, terminated=done, info={"count": self.count}
        )


def make_agent(replies: Any, *, cls: type[Agent] = Agent, **kwargs: Any) -> Agent:
    """An agent on a scripted client, reading <a>…</a>; every part can be replaced."""
    client = replies if hasattr(replies, "complete_tokens") else ScriptedClient(replies)
    settings: dict[str, Any] = {
        "client": client,
        "model": "fake",
        "ctx": FullDialog(),
        "parser": xml_tag_parser("a"),
        "chat_template": ByteTemplate(tool_parser=HermesToolParser()),
    }
    return cls(**{**settings, **kwargs})


async def status_with_header(url: str, name: str, value: bytes, method: str = "GET") -> int:
    """The status of a request with this header, whose bytes no client library would send."""

    def ask() -> int:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
        connection.putrequest(method, parts.path)
        connection.putheader(name, value)
        connection.endheaders()
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(ask)
