"""`EnvPool`: envs in worker processes of this machine, or behind an env server on another.

    async with EnvPool("tic_tac_toe", workers=4) as pool:
        engine = RolloutEngine(env_registry={"tic_tac_toe": pool.make}, …)

See docs/env-workers.md.
"""

import asyncio
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ludic import registry
from ludic.types import ConfigError, EnvCrashed
from ludic.types.errors import retry_wait_s
from ludic_envs.workers.remote import RemoteEnv, WorkerLine, close_remotely, remote_class
from ludic_envs.workers.server import ServerAddress, ServerInfo, connect
from ludic_envs.workers.supervisor import Supervisor, WorkerSetup

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_HEARING_S = 0.01
"""Between two looks at whether the supervisor has heard that a worker retires."""
_numbers = itertools.count(1)
"""Numbers of envs. A worker knows an env by its connection and this number."""


class EnvPool:
    """Makes envs in worker processes. They are started by the first `make`, and end with `close` or with this process."""

    def __init__(
        self,
        env: str | Callable[..., Any] | None = None,
        *,
        workers: int = 2,
        env_args: Mapping[str, Any] | None = None,
        server: str | None = None,
        token: str | None = None,
        timeout_s: float | None = 600.0,
        memory_mb: int | None = None,
        hints: bool = False,
        reconnect_s: float = 60.0,
    ) -> None:
        """`env`: a registered env, `file.py:Name`, `module:Name`, or a class or function of a module; with `server`, the name of
        one that the server has, or None if it has one. `env_args` are arguments of every env. A worker whose event loop stands
        still for `timeout_s` is killed; `memory_mb` is what all envs of a worker may allocate together. With `hints`, replies
        carry legal and reference actions. `server`: host:port of a `ludic env-server`, whose workers and limits these are, then;
        `token` is $LUDIC_ENV_TOKEN by default. A lost connection is renewed within `reconnect_s`.
        """
        if workers < 1 or (memory_mb is not None and memory_mb < 1) or (timeout_s is not None and timeout_s <= 0):
            raise ConfigError(
                f"workers={workers}, memory_mb={memory_mb}, timeout_s={timeout_s}; give at least 1 worker, and limits above 0 "
                "or None."
            )
        self._args = dict(env_args or {})
        self._hints = hints
        self._num = workers
        self._address = None if server is None else ServerAddress.parse(server, token)
        self._reconnect_s = reconnect_s
        self._supervisor: Supervisor | None = None
        self._info: ServerInfo | None = None
        self._lock = threading.Lock()
        self._lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Connecting]]
        self._lines = weakref.WeakKeyDictionary()
        self._load: list[int] = []
        self._is_closed = False
        if self._address is None and env is None:
            raise ConfigError("EnvPool needs an env: an id (`ludic envs`), file.py:Name, or a class.")
        self.env = env if isinstance(env, str) or env is None else registry.name_of(env)
        self._setup: WorkerSetup | None = None
        if self._address is None:
            self._setup = WorkerSetup(envs={"env": importable(env)}, timeout_s=timeout_s, memory_mb=memory_mb)

    async def make(self, /, **kwargs: Any) -> RemoteEnv:
        """An env in the worker that has the fewest. Errors are those of the env's own constructor.

        A worker that is lost meanwhile may have been dying already, for another env's fault: then once more in its successor.
        """
        await self._begin()
        try:
            return await self._make(kwargs)
        except EnvCrashed as error:
            if self._is_closed or isinstance(error.__cause__, OSError | EOFError):  # no connection within `reconnect_s`
                raise
        await asyncio.sleep(_FIRST_WAIT_S)
        return await self._make(kwargs)

    async def _make(self, kwargs: Mapping[str, Any]) -> RemoteEnv:
        with self._lock:
            index = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[index] += 1
        release = _once(lambda: self._add_load(index, -1))
        number = next(_numbers)
        try:
            line = await self._line(index)
        except BaseException:
            release()
            raise
        try:
            made = await line.call(number, "make", [self._name, {**self._args, **kwargs}, self._hints])
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                await asyncio.shield(close_remotely(line, number, release))
            else:
                release()
                line.forget(number)
            raise
        kind = remote_class(made[0])
        return kind(line, number, made, release=release, with_hints=self._hints)

    @property
    def processes(self) -> list[int]:
        """Ids of the worker processes of this machine that run."""
        return [] if self._supervisor is None else self._supervisor.processes

    @property
    def num_restarts(self) -> int:
        """Workers of this machine that were started in the place of another."""
        return 0 if self._supervisor is None else self._supervisor.num_restarts

    @property
    def num_envs(self) -> int:
        """Envs that are made and not closed."""
        return sum(self._load)

    @property
    def info(self) -> "ServerInfo | None":
        """The server's description of itself, once it is connected."""
        return self._info

    def close(self) -> None:
        """End all workers of this machine, or the connections to the server. Episodes that run fail."""
        with self._lock:
            self._is_closed = True
            lines = [line for each in self._lines.values() for line in each.values()]
            self._lines.clear()
        for line in lines:
            line.close()
        if self._supervisor is not None:
            self._supervisor.close()

    async def __aenter__(self) -> "EnvPool":
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- connections ---

    async def _begin(self) -> None:
        """Start the workers, or ask the server about its own."""
        if self._is_closed:
            raise EnvCrashed("The pool of env workers is closed.")
        if self._load:
            return
        if self._address is not None:
            sock, info = await connect(self._address, worker=None)
            sock.close()
            self._name, self._info = info.require(self.env), info
        with self._lock:
            if self._load:
                return
            if self._setup is not None:
                self._name = "env"
                self._supervisor = Supervisor(self._setup, self._num)
                weakref.finalize(self, self._supervisor.close)
            self._load = [0] * (self._num if self._info is None else self._info.num_workers)

    def _add_load(self, index: int, num: int) -> None:
        with self._lock:
            self._load[index] += num

    async def _line(self, index: int) -> WorkerLine:
        """This event loop's connection to the worker that takes new envs in place `index`.

        All who wait for it meanwhile share one attempt: they fail together when `reconnect_s` has passed."""
        begin = asyncio.get_running_loop().time()
        with self._lock:
            lines = self._lines.setdefault(asyncio.get_running_loop(), {})
            connecting = lines.setdefault(index, _Connecting())
        async with connecting.lock:
            if connecting.line is None or not connecting.line.is_usable:
                former = connecting.line
                connecting.retire()
                if connecting.failure is not None and connecting.failed_at >= begin:
                    raise EnvCrashed(str(connecting.failure)) from connecting.failure.__cause__
                try:
                    connecting.line = await self._connected(index, former)
                except EnvCrashed as error:
                    connecting.failure, connecting.failed_at = error, asyncio.get_running_loop().time()
                    raise
            return connecting.line

    async def _connected(self, index: int, former: WorkerLine | None) -> WorkerLine:
        deadline = asyncio.get_running_loop().time() + self._reconnect_s
        for attempt in itertools.count():
            try:
                return await (
                    self._to_worker(index, former) if self._address is None else self._to_server(self._address, index)
                )
            except (OSError, EOFError) as error:
                if self._is_closed or asyncio.get_running_loop().time() > deadline:
                    where = "an env worker" if self._address is None else f"the env server at {self._address}"
                    raise EnvCrashed(f"There is no connection to {where}: {error or type(error).__name__}") from error
            await asyncio.sleep(retry_wait_s(attempt, _FIRST_WAIT_S, _LONGEST_WAIT_S))
        raise AssertionError("the loop has no end")

    async def _to_worker(self, index: int, former: WorkerLine | None) -> WorkerLine:
        """A line to the worker in place `index`. A worker that retires tells this process and its supervisor, which may hear it
        later."""
        assert self._supervisor is not None, "_begin makes it"
        left = former.worker if former is not None and former.is_retiring else None
        worker = await asyncio.shield(asyncio.wrap_future(self._supervisor.worker(index)))
        while worker is left:
            await asyncio.sleep(_HEARING_S)
            worker = await asyncio.shield(asyncio.wrap_future(self._supervisor.worker(index)))
        ours, theirs = socket.socketpair()
        try:
            worker.connect(theirs)
        except OSError:
            ours.close()
            raise
        return WorkerLine(ours, index, worker=worker)

    async def _to_server(self, address: ServerAddress, index: int) -> WorkerLine:
        sock, _ = await connect(address, worker=index, is_new=False, open_s=self._reconnect_s)
        return WorkerLine(sock, index, worker=None, server=str(address))


class _Connecting:
    """The line to one worker, and those to its predecessors that still have envs."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.line: WorkerLine | None = None
        self.failure: EnvCrashed | None = None
        """Why the last attempt was given up."""
        self.failed_at = 0.0
        self._retired: list[WorkerLine] = []

    def retire(self) -> None:
        if self.line is not None:
            self._retired = [line for line in (*self._retired, self.line) if line.is_open]
            self.line = None

    def close(self) -> None:
        for line in (*self._retired, *([self.line] if self.line is not None else [])):
            line.close()


def _once(call: Callable[[], None]) -> Callable[[], None]:
    todo = [call]
    return lambda: todo.pop()() if todo else None


def importable(env: Any) -> tuple[str, dict[str, Any]]:
    """(id that another process knows, arguments) of an env; ConfigError for one that cannot be named there."""
    if isinstance(env, str) and ":" in env:
        return _absolute(env), {}
    if isinstance(env, str):
        spec = registry.envs.spec(env)
        if env in registry.Registry("env"):
            return env, {}
        env, kwargs = spec.load(), dict(spec.kwargs)  # registered by this program
    else:
        kwargs = {}
    name = registry.name_of(env)
    if any(part in getattr(env, "__qualname__", "<") for part in ("<", ".")):
        raise ConfigError(
            f"{name} cannot be made in another process: it has no name at the top of a module. Give a class or a function of a "
            "module, an id, or file.py:Name."
        )
    return _absolute(name), kwargs


def _absolute(id: str) -> str:
    place, _, name = id.rpartition(":")
    return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else id
