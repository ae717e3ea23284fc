"""The viewer's HTTP server: JSON under /api, the page's files, and events while runs write. It only answers GET.

It listens on this machine unless a token is given. Model output is hostile: the page's policy (CSP) allows scripts and requests
of this server only, and `AppServer` keeps other web pages from reading runs through a browser.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from ludic.http.address import check_host
from ludic.http.app import AppServer, ServerLimits, guard
from ludic.http.errors import describe_error
from ludic.http.tokens import bearer_of
from ludic.util.urls import is_same_secret
from ludic_view import api
from ludic_view.index import RunIndex, Runs

PORT = 7711
PAGE = Path(__file__).parent / "page"
POLL_S = 0.5
_READING_S = 0.5
"""Time for reading in one request: the page asks again while a large file is read."""
_KEEP_ALIVE_S = 15.0
_MAX_STREAMS = 64
_COOKIE = "ludic_view"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
}


WITHOUT_TOKEN = (
    "Listening on {host!r} shows every rollout to all who reach this machine. Give a --token, which the page's address then "
    "contains, or use 127.0.0.1 and an SSH tunnel."
)


def make_app(runs: Runs, *, token: str | None = None, page: Path = PAGE) -> web.Application:
    server = _Server(runs, token, page)
    app = web.Application(middlewares=[guard(ServerLimits(), _answer_error, admit=server.check)])
    app.on_response_prepare.append(_add_headers)
    app.router.add_get("/{path:.*}", server.answer)
    return app


async def serve(
    runs: Runs,
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    token: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until cancelled. Port 0 takes a free one; `on_ready` gets the address to open."""
    check_host(host, token, problem=WITHOUT_TOKEN)
    server = AppServer(make_app(runs, token=token), ServerLimits(), has_token=bool(token))

    def announce(url: str) -> None:
        if on_ready is not None:
            on_ready(f"{url}/{f'?token={token}' if token else ''}")

    await server.serve(host, port, on_ready=announce)


class _Server:
    def __init__(self, runs: Runs, token: str | None, page: Path) -> None:
        self._runs, self._token, self._page = runs, token, page
        self._num_streams = 0

    def check(self, request: web.Request) -> None:
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
        if self._token is None:
            return
        given = (bearer_of(request.headers), request.cookies.get(_COOKIE, ""), request.query.get("token", ""))
        if not any(is_same_secret(each, self._token) for each in given if each):
            raise web.HTTPUnauthorized(reason="Open the address with its ?token=, or send it as a bearer token")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if not (path == "/api" or path.startswith("/api/")):
            return self._file(request, path)
        if path.endswith("/events"):
            return await self._events(request, path)
        body = await asyncio.to_thread(self._json, f"{path}?{request.rel_url.raw_query_string}")
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    def _json(self, path: str) -> bytes:
        return api.encode(api.answer(self._runs, path, seconds=_READING_S))

    def _file(self, request: web.Request, path: str) -> web.Response:
        """A file of the page; only names that are there, so no path leads elsewhere."""
        name = unquote(path).lstrip("/") or "index.html"
        there = {
            place.relative_to(self._page).as_posix(): place
            for place in self._page.rglob("*")
            if place.suffix in _KINDS and place.is_file() and not place.is_symlink()
        }
        if name not in there:
            raise api.NotFound(f"There is no {name!r:.100}.")
        kind = _KINDS[there[name].suffix]
        charset = "utf-8" if kind.startswith(("text/", "application/")) else None
        response = web.Response(body=there[name].read_bytes(), content_type=kind, charset=charset)
        if self._token is not None and request.query.get("token"):
            response.set_cookie(_COOKIE, self._token, httponly=True, samesite="Strict")
        return response

    # --- live ---

    async def _events(self, request: web.Request, path: str) -> web.StreamResponse:
        index = await asyncio.to_thread(self._index, path.removesuffix("/events"))
        if self._num_streams >= _MAX_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{_MAX_STREAMS} pages listen already")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self._num_streams += 1
        try:
            async for event in _news(index):
                text = b": nothing new\n\n" if event is None else b"data: " + msgspec.json.encode(event) + b"\n\n"
                await response.write(text)
        except (ConnectionError, asyncio.CancelledError):  # the page was closed, or the server ends
            pass
        finally:
            self._num_streams -= 1
        return response

    def _index(self, path: str) -> RunIndex:
        id = unquote(path.removeprefix("/api/runs/"))
        if id not in self._runs.ids():
            raise api.NotFound(f"There is no run {id!r:.80}.")
        return self._runs.get(id)


async def _news(index: RunIndex) -> AsyncIterator[dict[str, Any] | None]:
    """An event for each thing that a run appends; None from time to time, so that a closed connection is noticed."""
    loop = asyncio.get_running_loop()
    before = await asyncio.to_thread(index.stamp)
    await asyncio.to_thread(index.refresh)
    state, spoken = api.state_of(index), loop.time()
    yield {"kind": "state", "state": state, "step": _last_step(index)}
    while True:
        await asyncio.sleep(POLL_S if index.is_complete else POLL_S / 10)
        now = await asyncio.to_thread(index.stamp)
        kinds = [
            kind for kind, old, new in zip(("metrics", "rollouts", "tokens"), before, now, strict=True) if old != new
        ]
        if not index.is_complete:
            kinds.append("rollouts")
        if kinds:
            await asyncio.to_thread(index.refresh)
        before = now
        new_state = api.state_of(index)
        if new_state != state:
            state = new_state
            kinds.append("state")
        for kind in dict.fromkeys(kinds):
            spoken = loop.time()
            yield {
                "kind": kind,
                "step": _last_step(index),
                "num_rollouts": len(index.cards),
                "state": state,
                "is_complete": index.is_complete,
            }
        if loop.time() - spoken > _KEEP_ALIVE_S:
            spoken = loop.time()
            yield None


def _last_step(index: RunIndex) -> int:
    return max(index.metrics, default=0)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, OSError):  # a file that a run has just removed
        status, message = 404, f"A file cannot be read: {error.strerror}."
    else:
        status, _, _, message = describe_error(error)
    body = api.encode({"error": {"message": message}})
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8")
