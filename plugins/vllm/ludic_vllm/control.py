"""Access to a vLLM server's control endpoints: the control token, and the middleware that requires it.

A client that can replace a server's weights controls what is trained on it, so the token belongs to the user who started the
server: a file of mode 600 in the run folder. Servers started on the same folder share it. The middlewares run inside the
server process (`--middleware ludic_vllm.control.ControlGuard`) and import nothing of vLLM.
"""

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from ludic.types import ConfigError
from ludic.util.die_with_parent import watch_parent
from ludic.util.urls import is_same_secret

CONTROL_HEADER = "X-Ludic-Control-Token"
"""The request header that carries the token."""
CONTROL_VARIABLE = "LUDIC_CONTROL_TOKEN"
"""The environment variable that passes the token to a server process."""
TOKEN_FILE = "control_token"
"""The file of a run folder that holds the token."""


def make_control_token(folder: Path) -> str:
    """The token of this run folder; creates one if there is none."""
    path = folder / TOKEN_FILE
    folder.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(prefix=f".{TOKEN_FILE}-", dir=folder)  # mkstemp creates mode 600
    try:
        with os.fdopen(number, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        # A link fails if the name exists, so of two servers that start at once one writes and both read the same token.
        os.link(temporary, path)
    except FileExistsError:
        pass  # another server on this folder was first
    finally:
        os.unlink(temporary)
    return read_control_token(path)


def read_control_token(path: Path) -> str:
    """The token in `path`: the file itself, or the run folder it is in."""
    file = path / TOKEN_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"No control token at {file}; a server writes it when it starts with that run folder.")
    mode, token = stat.S_IMODE(file.stat().st_mode), file.read_text().strip()
    if mode & 0o077 or not token:
        problem = f"has mode {mode:o}, so others on this machine may have read it" if mode & 0o077 else "is empty"
        raise ConfigError(f"The control token {file} {problem}. Delete it and start the server again for a new one.")
    return token


# --- inside the server ---

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
