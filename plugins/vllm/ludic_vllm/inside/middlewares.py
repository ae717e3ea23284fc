"""ASGI middlewares of a vLLM server: one requires the control token (`ludic.http.tokens`), one adds weight versions.

They run inside the server process (`--middleware ludic_vllm.inside.middlewares.ControlGuard`) and import nothing of vLLM.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ludic.http.tokens import CONTROL_HEADER, CONTROL_VARIABLE, TOKEN_FILE
from ludic.types import ConfigError
from ludic.util.files import parse_json
from ludic.util.urls import is_same_secret

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_GET = {
    "/health", "/ping", "/load", "/metrics", "/metrics/", "/version", "/v1/models",
    "/weight_info", "/is_paused", "/is_sleeping", "/get_world_size",
}  # fmt: skip
_POST = {
    "/v1/completions", "/v1/chat/completions", "/v1/completions/render", "/v1/chat/completions/render",
    "/inference/v1/generate", "/tokenize", "/detokenize", "/ping",
}  # fmt: skip
OPEN: frozenset[tuple[str, str]] = frozenset(
    {(method, path) for method in ("GET", "HEAD") for path in _GET}
    | {("POST", path) for path in _POST}
    | {("OPTIONS", path) for path in _GET | _POST}  # a browser's preflight request
)
"""Method and path of everything that needs no control token (inference may still need vLLM's --api-key)."""


class ControlGuard:
    """Passes requests that are open or carry the token; answers 401 to all others before vLLM sees them.

    vLLM's --api-key covers none of the endpoints that pause the server, replace its weights or call methods of its workers.
    An endpoint that a new vLLM adds is guarded until `OPEN` lists it.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(CONTROL_VARIABLE, "")
        if not token:
            raise ConfigError(
                f"The environment variable {CONTROL_VARIABLE} is not set, so no client could use the control "
                "endpoints. Start the server with `python -m ludic_vllm.vllm_server`, which sets it."
            )
        self.app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            message = (
                f"{scope['method']} {scope['path']} changes or inspects the server, but the control token is missing or wrong. "
                f"Send it in the header {CONTROL_HEADER}; it is the file {TOKEN_FILE} in the server's run folder."
            )
            await _answer(send, 401, {"error": {"message": message, "type": "Unauthorized", "code": 401}})
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": f"needs {CONTROL_HEADER}"})

    def _may_pass(self, scope: Scope) -> bool:
        # --root-path puts a prefix before every path, which the router removes.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and (scope["method"], path) in OPEN:
            return True
        name = CONTROL_HEADER.lower().encode()
        return any(is_same_secret(value, self._token) for key, value in scope["headers"] if key == name)


class WeightVersions:
    """Gives an older vLLM the weight versions of a newer one: the label of the last push, kept in the API
    server's process. It serves one such process (vLLM's default), and does not know which token came from which version."""

    def __init__(self, app: App) -> None:
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
