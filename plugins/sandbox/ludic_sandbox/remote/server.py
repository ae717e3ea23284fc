"""`SandboxServer`: a sandbox pool of this machine behind HTTP, for harnesses on other machines.

Runs wait in a bounded queue and take turns by client, so that a client with many runs does not hold up the others. A client that
hangs up ends its run. The token is required for everything but /health; there is no encryption, so the port belongs on a private
network or behind a tunnel.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields

from aiohttp import web

from ludic.http.app import AppServer, Load, ServerLimits, guard, json_error
from ludic.http.errors import RequestRefused
from ludic.http.tokens import require_secret
from ludic.http.turns import NoTurn, Turns
from ludic.types import ConfigError
from ludic_sandbox.interface import MB, SandboxError
from ludic_sandbox.pool import BaseSandboxPool
from ludic_sandbox.requests import (
    PROTOCOL,
    TOKEN_HEADER,
    Request,
    RequestSandbox,
    Result,
    ServerInfo,
    decode_request,
    encode,
)

_LONGEST_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Limits of one run, of one client, and of all clients together."""

    max_timeout_s: float = 120.0
    max_memory_mb: int = 2048
    max_processes: int = 256
    max_workspace_mb: int = 1024
    max_waiting: int = 1000
    """Runs of all clients that wait for a sandbox."""
    max_per_client: int = 256
    """Runs of one address that wait or are in progress."""
    max_body_mb: int = 64
    """Size of one request: program, input and files."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise ConfigError(f"RunLimits.{limit.name}={getattr(self, limit.name)}; it must be above 0.")

    def check(self, request: Request) -> None:
        """ConfigError for a run that asks for more than it may."""
        for name, value in request.asked().items():
            limit = getattr(self, f"max_{name}")
            if value is not None and not value <= limit:
                raise ConfigError(
                    f"The run asks for {name}={value:g}, and this sandbox server allows {limit:g} (--max-{name.replace('_', '-')})."
                )


class RunQueue:
    """Places for runs, of which clients take turns; the number of runs that wait is bounded, for each client and for all."""

    def __init__(self, num_slots: int, limits: RunLimits) -> None:
        self._num_slots = num_slots
        self._limits = limits
        self.turns = Turns(num_slots)
        self._num_of: Counter[str] = Counter()
        """Runs by client, waiting or in progress."""

    @contextlib.asynccontextmanager
    async def turn(self, client: str, wait_s: float) -> AsyncIterator[None]:
        """Wait for a place and hold it; RequestRefused if the queue is full or no place comes free in time."""
        limits, turns = self._limits, self.turns
        if self._num_of[client] >= limits.max_per_client:
            raise RequestRefused(429, "client_limit", f"This client has {limits.max_per_client} runs here already.")
        if turns.num_running >= self._num_slots and turns.num_waiting >= limits.max_waiting:
            raise RequestRefused(429, "queue_full", f"{limits.max_waiting} runs are waiting already.")
        self._num_of[client] += 1
        try:
            async with turns.turn(client, wait_s=wait_s):
                yield
        except NoTurn as e:
            raise RequestRefused(503, "no_sandbox", f"No sandbox came free within {wait_s:g} s.") from e
        finally:
            self._num_of[client] -= 1
            self._num_of += Counter()  # forgets clients without runs


class SandboxServer:
    """Serves a pool, which it starts and shuts down."""

    def __init__(self, pool: BaseSandboxPool, *, token: str, limits: RunLimits | None = None) -> None:
        if not token:
            raise ConfigError("A sandbox server needs a token: it runs programs for every client that can reach it.")
        self.url = ""
        self._pool = pool
        self._token = token
        self._limits = limits or RunLimits()
        self._http = ServerLimits(
            max_body_bytes=self._limits.max_body_mb * MB, max_body_bytes_in_all=8 * self._limits.max_body_mb * MB
        )
        self._load = Load(self._http)
        self._num_sandboxes = pool.num_workers
        self._queue = RunQueue(pool.num_workers, self._limits)
        self._restarting = asyncio.Lock()
        self._app_server = AppServer(self._app(), self._http, has_token=True)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start the pool, then listen. Port 0 takes a free one; `url` is set then."""
        await self._pool.start()
        try:
            self.url = await self._app_server.start(host, port)
        except BaseException:
            await self._pool.shutdown()
            raise

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening; runs in progress may continue for `drain_s`, or until this is cancelled."""
        try:
            await self._app_server.close(drain_s)
        finally:
            await self._pool.shutdown()

    def _app(self) -> web.Application:
        guarded = guard(self._http, _answer_error, admit=self._check_token)
        app = web.Application(middlewares=[guarded], handler_args={"handler_cancellation": True})
        app.add_routes(
            [web.get("/health", self._health), web.get("/info", self._info), web.post("/run", self._run)],
        )
        return app

    def _check_token(self, request: web.Request) -> None:
        if request.path != "/health":
            message = f"The header {TOKEN_HEADER} must hold the token of this sandbox server."
            require_secret(request.headers.get(TOKEN_HEADER, ""), self._token, RequestRefused(401, "token", message))

    async def _health(self, request: web.Request) -> web.Response:
        facts = {
            "status": "failed" if self._pool.has_given_up else "ok",
            "sandboxes": self._num_sandboxes,
            "running": self._queue.turns.num_running,
            "waiting": self._queue.turns.num_waiting,
        }
        return web.json_response(facts, status=503 if self._pool.has_given_up else 200)

    async def _info(self, request: web.Request) -> web.Response:
        await self._repair()
        info = ServerInfo(
            protocol=PROTOCOL, python_version=self._pool.python_version, num_sandboxes=self._num_sandboxes
        )
        return web.Response(body=encode(info), content_type="application/msgpack")

    async def _run(self, request: web.Request) -> web.Response:
        async with self._load.body(request) as data:
            asked = decode_request(data)
            self._limits.check(asked)
            async with self._queue.turn(request.remote or "", _wait_s(request)):
                result = await self._result(asked)
        return web.Response(body=encode(result), content_type="application/msgpack")

    async def _result(self, asked: Request) -> Result:
        await self._repair()
        sandbox = await self._pool.checkout(_LONGEST_WAIT_S)  # its turn has come: at most a reset is to be awaited
        try:
            assert isinstance(sandbox, RequestSandbox), "those of every back end are"
            result: Result = await sandbox.perform(asked)
            return result
        finally:
            await self._pool.release(sandbox)

    async def _repair(self) -> None:
        """Start a pool again that has given up; SandboxError if its sandboxes still cannot be made."""
        if self._pool.has_given_up:
            async with self._restarting:
                if self._pool.has_given_up:
                    await self._pool.shutdown()
                    await self._pool.start()


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, SandboxError):
        error = RequestRefused(502, "sandbox_error", str(error))
    return json_error(request, error)


def _wait_s(request: web.Request) -> float:
    given = request.query.get("wait_s", "60")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_WAIT_S:
        raise ConfigError(
            f"wait_s={given!r:.40}; it must be a number of seconds, above 0 and at most {_LONGEST_WAIT_S:g}."
        )
    return seconds
