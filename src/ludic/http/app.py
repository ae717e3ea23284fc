"""An aiohttp application on a port, from its start to its end.

The end has two parts. `drain` refuses new requests and waits for those in progress; `close` ends what is left. Servers differ in
their handlers, keys and the form of their errors: all of them start and end here, and answer through `guard`.

A browser lets any web page send requests to servers that its machine reaches. A server without a token answers only requests that
no page of another origin sends and, if it listens on this machine only, that name this machine (a name that an attacker's DNS
points here is another).
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ludic.http.address import url_of
from ludic.http.errors import RequestRefused, describe_error
from ludic.types import ConfigError
from ludic.util.urls import is_loopback

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

    from ludic.types import TokenCompletionRequest

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CANCELLED_S = 0.5
"""Time for cancelled handlers to end; aiohttp waits this long twice."""

# --- limits: memory that open requests hold, and time that a client may take ---
#
# A request takes memory from its first byte, long before the engine counts it. So each stage has its own limit and checks it
# before the next stage allocates anything: the connection, the head, the body, the requested completions.


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Limits of one server. The sizes add up to some hundred megabytes in addition to the engine."""

    max_connections: int = 1024
    """Open at the same time; one more is answered 503 and closed."""
    head_s: float = 75.0
    """Seconds for the whole head of a request, from the opening of the connection or the last answer on it. Proxies keep idle
    connections for a minute and expect the server to keep them longer."""
    body_s: float = 120.0
    """Seconds for a whole body to arrive."""
    answer_s: float = 300.0
    """Seconds for the client to read what was written of its answer."""
    max_body_bytes: int = 16 * 2**20
    max_body_bytes_in_all: int = 256 * 2**20
    """Size of all bodies being received or read."""
    max_completions: int = 8192
    """Completions in progress over all requests: prompts times `n`."""
    max_prompt_tokens: int = 1 << 24
    """Tokens of all their prompts. A waiting prompt takes about 40 bytes a token."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"ServerLimits.{name}={getattr(self, name)}; it must be above 0.")


class Load:
    """Resources held by the requests in progress."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.num_body_bytes = self.num_completions = self.num_prompt_tokens = 0

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, counted until the caller has finished with it."""
        limits, chunks, size = self._limits, [], 0
        try:
            try:
                async with asyncio.timeout(limits.body_s):
                    if (request.content_length or 0) > limits.max_body_bytes:
                        raise _too_large(limits)
                    async for chunk in request.content.iter_any():
                        size += len(chunk)
                        self.num_body_bytes += len(chunk)
                        if size > limits.max_body_bytes:
                            raise _too_large(limits)
                        if self.num_body_bytes > limits.max_body_bytes_in_all:
                            raise _busy(f"It already holds {limits.max_body_bytes_in_all // 2**20} MB of bodies.")
                        chunks.append(chunk)
            except TimeoutError as error:
                raise RequestRefused(
                    408, "body_timeout", f"The body did not arrive within {limits.body_s:g} s."
                ) from error
            except web.RequestPayloadError as error:
                raise ConfigError(f"The body could not be received: {error}") from error
            yield b"".join(chunks)
        finally:
            self.num_body_bytes -= size

    @contextlib.contextmanager
    def completions(self, requests: "Sequence[TokenCompletionRequest]") -> Iterator[None]:
        """Count completions in progress; refuses them before they reach the engine."""
        num, limits = len(requests), self._limits
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        for what, held, more, limit in (
            ("completions", self.num_completions, num, limits.max_completions),
            ("prompt tokens", self.num_prompt_tokens, num_tokens, limits.max_prompt_tokens),
        ):
            if held + more > limit:
                raise _busy(f"{held} {what} are in progress, and {more} more would pass the limit of {limit}.")
        self.num_completions += num
        self.num_prompt_tokens += num_tokens
        try:
            yield
        finally:
            self.num_completions -= num
            self.num_prompt_tokens -= num_tokens


@contextlib.asynccontextmanager
async def answering(request: web.Request, limits: ServerLimits) -> AsyncIterator[None]:
    """Wraps writes to the client; disconnects a client that does not read in time."""
    try:
        async with asyncio.timeout(limits.answer_s):
            yield
    except (TimeoutError, ConnectionError) as error:
        # Also reached if the client has disconnected and aiohttp is about to cancel; then no error can be sent.
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError from error


def _too_large(limits: ServerLimits) -> RequestRefused:
    size = limits.max_body_bytes
    shown = f"{size // 2**20} MB" if size >= 2**20 else f"{size} bytes"
    return RequestRefused(413, "body_too_large", f"The body is larger than {shown}.")


def _busy(why: str) -> RequestRefused:
    return RequestRefused(
        429, "queue_full", f"The server is busy. {why} Send fewer requests at once, or try again later."
    )


class Connection(web.RequestHandler):
    """aiohttp's handler, closed if no request comes. aiohttp itself watches only the time between two requests (until 3.14.5)."""

    is_heard = False
    """The head of a request has arrived; `AppServer` sets it."""

    def __init__(self, server: web.Server, limits: ServerLimits, **options: Any) -> None:
        # Keep reading briefly after a refusal, so that the client finds the answer and not a reset connection.
        lingering_s = min(10.0, limits.body_s)
        super().__init__(server, keepalive_timeout=limits.head_s, lingering_time=lingering_s, **options)
        self._head_s = limits.head_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(self._head_s, self._close_if_silent)

    async def start(self) -> None:
        """Also closes the transport when `close` ends an idle connection; aiohttp leaves it open until the server ends."""
        try:
            await super().start()
        finally:
            if self.transport is not None:
                self.transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log no traceback for malformed HTTP (answered 400) or a client that disconnects."""
        if not isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
            super().log_exception(*args, **kw)

    def _close_if_silent(self) -> None:
        if not self.is_heard:
            self.force_close()


class _TooMany(asyncio.Protocol):
    """A connection beyond the limit: answers 503 and closes."""

    def __init__(self, limits: ServerLimits) -> None:
        message = f"{limits.max_connections} connections are already open; try again later."
        error = {"message": message, "type": "server_error", "param": None, "code": "too_many_connections"}
        body = json.dumps({"error": error}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
        )
        self._answer = head.encode() + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writable = cast(asyncio.Transport, transport)
        writable.write(self._answer)
        writable.close()


async def listen(runner: web.AppRunner, host: str, port: int, limits: ServerLimits) -> asyncio.Server:
    """Accept connections for a set-up application, which closes them; the caller closes the server."""
    loop, app_server = asyncio.get_running_loop(), runner.server
    assert app_server is not None, "call runner.setup() first"
    options: dict[str, Any] = {"loop": loop, "access_log": None}

    def accept() -> asyncio.BaseProtocol:
        if len(app_server.connections) >= limits.max_connections:
            return _TooMany(limits)
        return Connection(app_server, limits, **options)

    try:
        return await loop.create_server(accept, host, port)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another port; 0 takes a free one."
        ) from error


def allow_many_files() -> None:
    """Raise this process's limit of open files to what the system allows: each connection is one, and 1,024 are too few."""
    try:
        import resource  # Unix only
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))


# --- the application ---


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
        """It listens on this machine only."""
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
