"""`RemoteSandboxPool`: the sandboxes of a `ludic sandbox-server` behind the interface of a local pool.

A run that has not started (the server is busy, or restarts) is sent again until `wait_s` has passed. A run that was lost is a
SANDBOX_ERROR: it is not known how the program would have ended. After a loss the pool waits for the server before it lends a
sandbox again.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

from ludic.http.client import Answer, EndpointError, HttpSessions, Unreachable, error_of
from ludic.types import ConfigError
from ludic.types.errors import retry_wait_s
from ludic.util.urls import PUT_LOGIN, refuse_login
from ludic_sandbox.interface import Bind, SandboxError
from ludic_sandbox.pool import BaseSandboxPool
from ludic_sandbox.process_sandbox import ActiveRuns
from ludic_sandbox.requests import (
    PROTOCOL,
    TOKEN_HEADER,
    Request,
    RequestSandbox,
    Result,
    ServerInfo,
    decode,
    encode,
)

TOKEN_VARIABLES = ("LUDIC_SANDBOX_TOKEN", "LUDIC_CONTROL_TOKEN")
_GRACE_S = 30.0
"""For the answer, beyond the wait for a sandbox, the compiler's time and the program's."""
_INFO_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class _NotStarted(Exception):
    """The server did not take the run; it may be sent again."""


class ServerConnection:
    """Sends runs to one server."""

    def __init__(self, url: str, token: str | None, wait_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a sandbox server. Write it like http://host:8002.")
        refuse_login("sandbox", url, PUT_LOGIN)
        if not wait_s > 0:
            raise ConfigError(f"wait_s={wait_s}; it must be above 0.")
        self.url = url.rstrip("/")
        self.wait_s = wait_s
        self.python_version = ""
        """Known after the first `info`."""
        self.is_doubtful = True
        """True if the server must be asked before the next run."""
        given = token if token is not None else next(filter(None, map(os.environ.get, TOKEN_VARIABLES)), None)
        # One connection per run: on a kept one that the server has closed meanwhile, a run may or may not have started.
        self._headers = {"Connection": "close", **({} if given is None else {TOKEN_HEADER: given})}
        self._has_token = given is not None
        self._http = HttpSessions([self.url], None, needed_for="A sandbox server as a back end")

    async def info(self) -> ServerInfo:
        """Facts of the server, which may be starting; SandboxError if it cannot be used."""
        data = await self._insistently(lambda _: self._ask("GET", "/info", timeout_s=_INFO_S))
        info = decode(data, ServerInfo)
        if info.protocol != PROTOCOL:
            raise SandboxError(
                f"The sandbox server at {self.url} speaks protocol {info.protocol}, and this Ludic {PROTOCOL}. Install the same "
                "version on both machines."
            )
        self.python_version, self.is_doubtful = info.python_version, False
        return info

    async def run(self, request: Request) -> bytes:
        """The server's answer; SandboxError if none came."""
        body = encode(request)
        try:
            return await self._insistently(lambda left_s: self._send(body, request.timeout_s, left_s))
        except SandboxError:
            self.is_doubtful = True
            raise

    async def close(self) -> None:
        await self._http.close()

    async def _send(self, body: bytes, timeout_s: float, wait_s: float) -> bytes:
        return await self._ask(
            "POST",
            "/run",
            body=body,
            params={"wait_s": f"{wait_s:.3f}"},
            timeout_s=wait_s + 2 * timeout_s + _GRACE_S,
        )

    async def _insistently(self, ask: Any) -> bytes:
        """The result of `ask(seconds left)`, repeated until the server takes it or the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.wait_s
        for attempt in itertools.count():
            try:
                data: bytes = await ask(max(0.001, deadline - loop.time()))
                return data
            except _NotStarted as e:
                pause_s = retry_wait_s(attempt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                if loop.time() + pause_s >= deadline:
                    raise SandboxError(f"{e} It was asked for {self.wait_s:g} s.") from e
                await asyncio.sleep(pause_s)
        raise AssertionError("the loop returns or raises")

    async def _ask(self, method: str, path: str, *, timeout_s: float, **how: Any) -> bytes:
        place = f"The sandbox server at {self.url}"
        try:
            answer = await self._http.ask(method, self.url + path, headers=self._headers, timeout_s=timeout_s, **how)
        except Unreachable as e:
            if method == "GET" or _is_before_the_request(e):
                raise _NotStarted(f"{place} cannot be reached: {e.__cause__ or e}") from e
            raise SandboxError(f"{place} was lost during the run: {e.__cause__ or e}") from e
        except EndpointError as e:
            raise SandboxError(f"{place} did not answer within {timeout_s:g} s.") from e
        return self._data(answer, place)

    def _data(self, answer: Answer, place: str) -> bytes:
        if answer.status == 200:
            return answer.data
        why = error_of(answer.text)["message"]
        match answer.status:
            case 400 | 413:
                raise ConfigError(why)
            case 401:
                what = "refuses the token" if self._has_token else "wants a token"
                raise SandboxError(
                    f"{place} {what}. Pass token=, or set ${TOKEN_VARIABLES[0]}; `ludic sandbox-server` names its file."
                )
            case 429 | 503:
                raise _NotStarted(f"{place} is busy: {why}")
            case 502:
                raise SandboxError(why)
            case status:
                raise SandboxError(f"{place} answered {status}: {why}")


def _is_before_the_request(error: Unreachable) -> bool:
    """True if the connection was not made, so that no run can have started."""
    import aiohttp

    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


class RemoteSandbox(RequestSandbox):
    """Sandbox and CommandSandbox of ludic_sandbox.interface on the sandboxes of a server."""

    def __init__(self, server: ServerConnection) -> None:
        self._server = server
        self._runs: ActiveRuns[bytes] = ActiveRuns()
        self._closed = False

    @property
    def python_version(self) -> str:
        return self._server.python_version

    async def reset(self) -> None:
        """End running jobs; after a loss, wait until the server answers."""
        await self._runs.end()
        if self._server.is_doubtful:
            await self._server.info()

    async def close(self) -> None:
        self._closed = True
        await self._runs.end()

    async def _run(self, request: Request, binds: Sequence[Bind]) -> Result:
        if binds:
            raise ConfigError(
                f"A sandbox server cannot show {binds[0].source} of this machine to a program. Send the content with files=."
            )
        if self._closed:
            raise SandboxError("This sandbox is closed. Check another one out of the pool.")
        result: Result = decode(await self._runs.run(self._server.run(request)), request.result_type)
        return result


class RemoteSandboxPool(BaseSandboxPool):
    """The sandboxes of a server. `n_workers`: how many runs this pool sends at a time; by default as many as the server has."""

    def __init__(
        self, url: str, *, token: str | None = None, wait_s: float = 60.0, n_workers: int | None = None, **settings: Any
    ) -> None:
        """`token` defaults to $LUDIC_SANDBOX_TOKEN. `wait_s`: how long a run may wait for a sandbox, or for a server that
        restarts."""
        super().__init__(n_workers=1 if n_workers is None else n_workers, **settings)
        self._takes_servers_number = n_workers is None
        self._server = ServerConnection(url, token, wait_s)

    @property
    def python_version(self) -> str:
        return self._server.python_version

    async def start(self) -> None:
        try:
            info = await self._server.info()
            if self._takes_servers_number:
                self._n_workers = info.num_sandboxes
            await super().start()
        except BaseException:
            await self._server.close()
            raise

    async def shutdown(self) -> None:
        await super().shutdown()
        with contextlib.suppress(RuntimeError):
            await self._server.close()

    async def _make_sandbox(self) -> RemoteSandbox:
        return RemoteSandbox(self._server)
