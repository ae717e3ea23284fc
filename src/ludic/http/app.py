"""An aiohttp application on a port, from its start to its end.

The end has two parts. `drain` refuses new requests and waits for those in progress; `close` ends what is left. Servers differ in
their handlers, keys and the form of their errors: all of them start and end here, and answer through `guard`.

A browser lets any web page send requests to servers that its machine reaches. A server without a token answers only requests that
no page of another origin sends and, if it listens on this machine only, that name this machine (a name that an attacker's DNS
points here is another).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from ludic.http.address import url_of
from ludic.http.errors import describe_error
from ludic.http.limits import Connection, ServerLimits, answering, listen
from ludic.util.urls import is_loopback

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CANCELLED_S = 0.5
"""How long handlers may take to end that are cancelled; aiohttp waits this long twice."""


def guard(
    limits: ServerLimits,
    answer_error: Callable[[web.Request, Exception], web.Response],
    *,
    admit: Callable[[web.Request], object] = lambda request: None,
) -> "Middleware":
    """A middleware that turns every error into a response and writes responses within the time limit; the only place that does.

    `admit` raises for a client without the secret. `answer_error` writes an error as the server's clients expect it.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            admit(request)
            response = await handler(request)
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error, and other requests continue
            response = answer_error(request, error)
        async with answering(request, limits):
            await response.prepare(request)
            await response.write_eof()
        return response

    return guarded


def json_error(request: web.Request, error: Exception) -> web.Response:
    """An error in OpenAI's format."""
    facts = describe_error(error)
    return web.json_response(facts.openai_body(), status=facts.status)


class AppServer:
    """Serves an application between `start` and `close`. The application's own middlewares turn a refusal into a response."""

    def __init__(self, app: web.Application, limits: ServerLimits, *, has_token: bool) -> None:
        """`has_token`: whether clients must send a secret."""
        self._has_token = has_token
        self._is_local = False
        """Whether it listens on this machine only."""
        app.middlewares.insert(0, self._count)
        app.middlewares.append(self._refuse)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CANCELLED_S)
        self._limits = limits
        self._listener: asyncio.Server | None = None
        self._busy: set[web.RequestHandler] = set()
        self._is_draining = False
        self._idle = asyncio.Event()

    async def start(self, host: str, port: int, *, unix_socket: str | Path | None = None) -> str:
        """Listen on an address, and on a Unix socket if one is given. Returns the URL; port 0 takes a free one."""
        self._is_local = is_loopback(host)
        await self._runner.setup()
        try:
            self._listener = await listen(self._runner, host, port, self._limits)
            if unix_socket is not None:
                await web.UnixSite(self._runner, str(unix_socket)).start()
        except BaseException:
            await self.close()
            raise
        return url_of(host, self._listener)

    async def serve(
        self, host: str, port: int, *, on_ready: Callable[[str], None] | None = None, drain_s: float = 0.0
    ) -> None:
        """Serve until cancelled; then requests in progress may continue for `drain_s`, or until this is cancelled again. `on_ready`
        gets the URL."""
        url = await self.start(host, port)
        try:
            if on_ready is not None:
                on_ready(url)
            await asyncio.Event().wait()
        finally:
            await self.close(drain_s)

    async def drain(self, seconds: float) -> None:
        """Accept no more connections and requests, close idle connections, and wait until the requests in progress have ended, so
        long at most. Their connections are closed after the answer."""
        self._is_draining = True
        if self._listener is not None:
            self._listener.close()
        for site in list(self._runner.sites):
            await site.stop()
        # Not all, with aiohttp's pre_shutdown: a connection that is to be closed drops the rest of a body.
        server = self._runner.server
        for connection in () if server is None else server.connections:
            if isinstance(connection, Connection) and connection not in self._busy:
                connection.close()
        if not self._busy or not seconds:
            return
        logger.warning("stopping; requests in progress, for %g s at most: %d", seconds, len(self._busy))
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("requests cut off after %g s: %d", seconds, len(self._busy))

    async def close(self, drain_s: float = 0.0) -> None:
        """Drain, then end all connections and the application. Cancelled while it drains, it ends them at once."""
        try:
            await self.drain(drain_s)
        finally:
            await self._runner.cleanup()

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if isinstance(request.protocol, Connection):
            request.protocol.is_heard = True
        self._busy.add(request.protocol)  # a connection has one request at a time
        try:
            response = await handler(request)
            if self._is_draining:
                response.force_close()
            return response
        except web.HTTPException as refusal:
            if self._is_draining:
                refusal.force_close()
            raise
        finally:
            self._busy.remove(request.protocol)
            if not self._busy and self._is_draining:
                self._idle.set()

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._is_draining:
            raise web.HTTPServiceUnavailable(reason="This server is stopping")
        if request.remote and not self._has_token:  # no page can reach a Unix socket, which has no address
            host = request.headers.get("Host", "localhost")
            if self._is_local:
                _check_host(host)
            if request.headers.get("Origin") not in (None, f"http://{host}"):
                raise web.HTTPForbidden(
                    reason="This server has no key or token, so it answers to no page of another origin"
                )
        return await handler(request)


def _check_host(host: str) -> None:
    """Refuse a name that may be an attacker's."""
    name, _, port = host.rpartition(":")
    name = name if port.isdecimal() else host
    if name != "localhost" and not is_loopback(name.strip("[]")):
        raise web.HTTPForbidden(
            reason=f"This server has no key or token, so it answers to localhost only and not to {host!r:.100}"
        )
