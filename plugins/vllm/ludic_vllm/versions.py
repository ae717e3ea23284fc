"""What differs between the vLLM releases that Ludic works with: one table, and a middleware for what an older release lacks.

docs/serving.md says what was run with which release. plugins/vllm/tests/test_vllm_versions.py compares this table, and every name
of vLLM that Ludic imports, with vLLM's sources. Runs in the trainer and inside the server: standard library only.
"""

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from ludic.util.files import parse_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One release of vLLM, and the later ones that the table does not list."""

    first: tuple[int, int]
    end: tuple[int, int]
    """The row was written for versions from `first` on, before `end`."""
    tested_on: Literal["CPU", "GPU"]
    """Where Ludic's tests ran with it: on a CPU in `make test`, on a GPU by hand (plugins/vllm/tests/test_cuda_vllm.py)."""
    entry_point: str
    """Module of the API server, for `python -m`."""
    generate_flag: str | None
    """The flag without which /inference/v1/generate is off; None where it is always on."""
    has_weight_versions: bool
    """/weight_info, /update_weight_version, `weight_version` of /finish_weight_update, and text and versions in the answers of
    /inference/v1/generate. Without them `WeightVersions` serves the endpoints, and the client takes /v1/completions."""
    configures_updates: bool
    """Whether the worker sets vLLM's current configuration while it loads weights; layers that are built again read it."""
    loads_beside_lora: bool
    """Whether all weights can be loaded into a server with --enable-lora: its layers have other names there."""
    rename_mapper: str
    """Method of a model's `hf_to_vllm_mapper`: the mapper without the fusing of layers."""
    reads_lora_patterns: bool
    """Whether an adapter's rank_pattern and alpha_pattern count (`PEFTHelper.get_rank_and_scaling`)."""
    batch_processor: str | None
    """Module of the logits-processor interface of the newer model runner; None: that runner takes no processors, and vLLM uses
    the older one when it is given one."""


RELEASES = (
    Release(
        first=(0, 26),
        end=(0, 27),
        tested_on="GPU",
        entry_point="vllm.entrypoints.openai.api_server",
        generate_flag=None,
        has_weight_versions=False,
        configures_updates=False,
        loads_beside_lora=False,
        rename_mapper="get_unstacked_mapper",
        reads_lora_patterns=False,
        batch_processor=None,
    ),
    Release(
        first=(0, 32),
        end=(0, 33),
        tested_on="CPU",
        entry_point="vllm.entrypoints.launchers.api_server.entry",
        generate_flag="--enable-scale-out",
        has_weight_versions=True,
        configures_updates=True,
        loads_beside_lora=True,
        rename_mapper="get_rename_mapper",
        reads_lora_patterns=True,
        batch_processor="vllm.v1.worker.gpu.sample.logits_processor.interface",
    ),
)


def number_of(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.1+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def release_of(version: str) -> Release:
    """The row for a version: of the listed releases the newest that is not newer, or the oldest."""
    number = number_of(version)
    return next((release for release in reversed(RELEASES) if release.first <= number), RELEASES[0])


def is_listed(version: str) -> bool:
    """Whether the table was written for this version, and not for an older or newer one."""
    release = release_of(version)
    return release.first <= number_of(version) < release.end


def version_range(release: Release) -> str:
    """The versions of a row in pip's notation."""
    first, end = (".".join(map(str, bound)) for bound in (release.first, release.end))
    return f">={first},<{end}"


TESTED_ON_CPU, TESTED_ON_GPU = (next(row for row in RELEASES if row.tested_on == place) for place in ("CPU", "GPU"))


# --- inside a server without weight versions --------------------------------------------------------------------


class WeightVersions:
    """An ASGI middleware that gives an older vLLM the weight versions of a newer one: the label of the last push, kept in the API
    server's process. It serves one such process (vLLM's default), and does not know which token came from which version."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.version = "default"
        """vLLM's label of a server that has had no push since its start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        match scope["method"], scope["path"].removeprefix(scope.get("root_path", "")):
            case "GET", "/weight_info":
                await _answer(send, 200, {"weight_version": self.version})
            case "POST", "/update_weight_version":
                label = _label(await _body(receive), "new_version")
                if label is None:
                    return await _answer(send, 400, {"error": {"message": "new_version is missing."}})
                self.version = label
                await _answer(send, 200, {"success": True, "new_version": label})
            case "POST", "/finish_weight_update":
                await self._finish(scope, receive, send)
            case _:
                await self.app(scope, receive, send)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The version begins when vLLM has answered that the update is finished."""
        body = await _body(receive)
        label = _label(body, "weight_version")
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200 and label is not None:
                self.version = label
            await send(message)

        await self.app(scope, receive_again, note)


async def _body(receive: Receive) -> bytes:
    whole, is_more = b"", True
    while is_more:
        message = await receive()
        whole += message.get("body", b"")
        is_more = message.get("more_body", False)
    return whole


def _label(body: bytes, field: str) -> str | None:
    try:
        found = parse_json(body or b"{}")
    except ValueError:
        return None
    label = found.get(field) if isinstance(found, dict) else None
    return label if isinstance(label, str) else None


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
