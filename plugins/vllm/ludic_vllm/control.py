"""The middlewares of a vLLM server: one requires the control token (`ludic.http.tokens`), one ends the server with its parent.

They run inside the server process (`--middleware ludic_vllm.control.ControlGuard`) and import nothing of vLLM.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ludic.http.tokens import CONTROL_HEADER, CONTROL_VARIABLE, TOKEN_FILE
from ludic.types import ConfigError
from ludic.util.die_with_parent import watch_parent
from ludic.util.urls import is_same_secret

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

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


class EndWithParent:
    """Ends the server with the program that started it. As a middleware, this runs in the process that SIGTERM stops cleanly."""

    def __new__(cls, app: App) -> Any:
        watch_parent()
        return app


class ControlGuard:
    """An ASGI middleware: passes requests that are open or carry the token; answers 401 to all others before vLLM sees them.

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

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(scope, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": f"needs {CONTROL_HEADER}"})

    def _may_pass(self, scope: Scope) -> bool:
        # --root-path puts a prefix before every path, which the router removes.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and (scope["method"], path) in OPEN:
            return True
        name = CONTROL_HEADER.lower().encode()
        return any(is_same_secret(value, self._token) for key, value in scope["headers"] if key == name)


async def _refuse(scope: Scope, send: Send) -> None:
    message = (
        f"{scope['method']} {scope['path']} changes or inspects the server, but the control token is missing or wrong. "
        f"Send it in the header {CONTROL_HEADER}; it is the file {TOKEN_FILE} in the server's run folder."
    )
    body = json.dumps({"error": {"message": message, "type": "Unauthorized", "code": 401}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
