"""`EnvServer`: worker processes that pools on other machines use, over TCP and with a token; and `connect`, a pool's side of it.

The server speaks first and sends a random challenge; the client answers with the HMAC of it, so the token itself never travels.
An admitted connection is handed to a worker process, which then speaks with the pool without the server in between. The frames
are not encrypted: across networks that others can read, use a tunnel (ssh, WireGuard).
"""

import asyncio
import contextlib
import hmac
import inspect
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from ludic import __version__, registry
from ludic.catalog import Suggested
from ludic.envs.threads import time_limit
from ludic.types import ConfigError, LudicError, UnknownName
from ludic.util.urls import is_same_secret
from ludic_envs.workers.supervisor import Supervisor, WorkerSetup
from ludic_envs.workers.wire import PROTOCOL, BadFrame, receive_frame, send_frame

TOKEN_VARIABLE = "LUDIC_ENV_TOKEN"
_NAME = "ludic env-server"
_HANDSHAKE_S = 10.0
_START_S = 120.0
"""For a worker to be ready: importing an env's packages may take long."""
_MAX_WAITING = 64
"""Connections in a handshake."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and its token."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str, token: str | None = None) -> "ServerAddress":
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"env_server = {text!r}; write host:port, as `ludic env-server` prints it.")
        return cls(host.strip("[]"), int(port), os.environ.get(TOKEN_VARIABLE, "") if token is None else token)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class _ServedEnv(msgspec.Struct):
    """A server's description of one of its envs: the facts that commands need before an episode."""

    takes_sample: bool
    suggested: dict[str, Any]
    example: dict[str, Any]


class ServerInfo(msgspec.Struct):
    """A server's description of itself."""

    num_workers: int
    envs: dict[str, _ServedEnv]

    def require(self, name: str | None) -> str:
        """The name of an env that the server has; None is the only one."""
        if name is None and len(self.envs) == 1:
            return next(iter(self.envs))
        if name is None:
            raise ConfigError(f"The env server has several envs; name one: {', '.join(self.envs)}.")
        if name not in self.envs:
            raise UnknownName.among("env on the server", name, self.envs, "Start it with that env as well.")
        return name


# --- a pool's side ---


async def connect(
    address: ServerAddress, *, worker: int | None, is_new: bool = True, open_s: float = _START_S
) -> tuple[socket.socket, ServerInfo]:
    """A connection to a worker of the server; to none of them to ask what it has.

    ConfigError if the server refuses. Where it cannot be reached, OSError or EOFError unless `is_new`: it may be restarting. A host
    that does not answer at all is given `open_s` seconds.
    """
    try:
        async with time_limit(open_s, f"Connecting to the env server at {address}"):
            sock = await _opened(address)
    except OSError as error:
        if not is_new:
            raise
        raise ConfigError(
            f"There is no env server at {address}: {error}. Start one there: ludic env-server ENV --port {address.port}"
        ) from error
    try:
        async with time_limit(_START_S, f"The handshake with the env server at {address}"):
            return sock, await _greet(sock, address, worker)
    except BaseException as error:
        sock.close()
        if isinstance(error, BadFrame | TimeoutError) or (isinstance(error, OSError | EOFError) and is_new):
            raise ConfigError(
                f"What listens at {address} does not answer like an env server ({error}). Give the host:port that `ludic "
                "env-server` prints."
            ) from error
        raise


async def _opened(address: ServerAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for number, (family, kind, proto, _, place) in enumerate(found, start=1):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
            _configure(sock)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError) or number == len(found):
                raise
    raise OSError(f"{address.host} has no address")


async def _greet(sock: socket.socket, address: ServerAddress, worker: int | None) -> ServerInfo:
    async with time_limit(_HANDSHAKE_S, "Its first message"):
        hello = await receive_frame(sock)
    if not isinstance(hello, dict) or hello.get("name") != _NAME or not isinstance(hello.get("challenge"), bytes):
        raise BadFrame("another kind of greeting")
    if hello.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"The env server at {address} (ludic {hello.get('version')}) speaks protocol {hello.get('protocol')}, this Ludic "
            f"({__version__}) protocol {PROTOCOL}. Install the same version on both machines."
        )
    await send_frame(sock, {"protocol": PROTOCOL, "proof": _proof(address.token, hello["challenge"]), "worker": worker})
    answer = await receive_frame(sock, max_frame=1 << 24)
    if not isinstance(answer, dict):
        raise BadFrame("no answer to the greeting")
    if "refused" in answer:
        raise ConfigError(f"The env server at {address} refuses: {answer['refused']}")
    try:
        return msgspec.convert(answer.get("info"), ServerInfo)
    except msgspec.ValidationError as error:
        raise BadFrame(str(error)) from error


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge, "sha256")


def _configure(sock: socket.socket) -> None:
    """Small frames leave at once. A peer that has vanished is noticed within 90 s: by the keepalives while nothing is on its way,
    else by TCP_USER_TIMEOUT; the kernel's own retransmissions end after a quarter of an hour."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 90_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- the server ---


class EnvServer:
    """Serves envs until it is cancelled. A client with the token may make these envs with any arguments, and no others."""

    def __init__(
        self,
        envs: Mapping[str, str] | Sequence[str],
        *,
        workers: int = 2,
        token: str = "",
        timeout_s: float | None = 600.0,
        memory_mb: int | None = None,
    ) -> None:
        """`envs`: ids, or names → ids."""
        named = dict(envs) if isinstance(envs, Mapping) else {id: id for id in envs}
        if not named:
            raise ConfigError("An env server needs an env: give one or several ids (`ludic envs`), or file.py:Name.")
        self.info = ServerInfo(num_workers=workers, envs={name: _served_env(id) for name, id in named.items()})
        self._token = token
        self._setup = WorkerSetup(
            envs={name: (id, {}) for name, id in named.items()}, timeout_s=timeout_s, memory_mb=memory_mb
        )
        self._workers: Supervisor | None = None

    async def serve(self, host: str, port: int, *, on_ready: Callable[[str], None] = lambda _: None) -> None:
        """Listen until cancelled; `on_ready` is called with host:port when the workers are ready."""
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setblocking(False)
        self._workers = Supervisor(self._setup, self.info.num_workers)
        admitting: set[asyncio.Task[None]] = set()
        try:
            for index in range(self.info.num_workers):
                await asyncio.shield(asyncio.wrap_future(self._workers.worker(index)))  # raises why one cannot start
            on_ready(f"{host}:{listener.getsockname()[1]}")
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                if len(admitting) >= _MAX_WAITING:
                    sock.close()
                    continue
                task = asyncio.create_task(self._admit(sock, self._workers))
                admitting.add(task)
                task.add_done_callback(admitting.discard)
        finally:
            listener.close()
            for task in admitting:
                task.cancel()
            await asyncio.gather(*admitting, return_exceptions=True)
            await asyncio.to_thread(self._workers.close)

    async def _admit(self, sock: socket.socket, workers: Supervisor) -> None:
        """Check who connects, and hand the connection to the worker that is asked for."""
        with contextlib.closing(sock), contextlib.suppress(OSError, EOFError, BadFrame, TimeoutError):
            sock.setblocking(False)
            _configure(sock)
            challenge = secrets.token_bytes(32)
            async with time_limit(_HANDSHAKE_S, "The handshake"):
                greeting = {"name": _NAME, "protocol": PROTOCOL, "version": __version__, "challenge": challenge}
                await send_frame(sock, greeting)
                asked = await receive_frame(sock)
            if (refused := self._refusal(asked, challenge)) is not None:
                await asyncio.sleep(0.2)  # slows down who guesses tokens
                await send_frame(sock, {"refused": refused})
                return
            if asked["worker"] is None:
                await send_frame(sock, {"info": self.info})
                return
            try:
                async with time_limit(_START_S, "The start of a worker"):
                    worker = await asyncio.shield(asyncio.wrap_future(workers.worker(asked["worker"])))
            except LudicError as error:
                await send_frame(sock, {"refused": str(error)})
                return
            await send_frame(sock, {"info": self.info})
            worker.connect(sock.dup())

    def _refusal(self, asked: Any, challenge: bytes) -> str | None:
        if not isinstance(asked, dict) or asked.get("protocol") != PROTOCOL:
            return f"it speaks protocol {PROTOCOL}. Install the same version of Ludic on both machines."
        proof = asked.get("proof")
        if self._token and not (isinstance(proof, bytes) and is_same_secret(proof, _proof(self._token, challenge))):
            return f"the token is wrong. Set ${TOKEN_VARIABLE} to the one that the server was started with."
        worker = asked.get("worker")
        if worker is not None and not (isinstance(worker, int) and 0 <= worker < self.info.num_workers):
            return f"it has the workers 0 to {self.info.num_workers - 1}."
        return None


def _served_env(id: str) -> _ServedEnv:
    """The facts of a registered env, or of file.py:Name."""
    spec = registry.envs.spec(id)
    takes_sample = "sample" in inspect.signature(spec.load()).parameters
    return _ServedEnv(takes_sample=takes_sample, suggested=asdict(spec.suggested), example=dict(spec.example))


def suggested_by(served: _ServedEnv) -> Suggested:
    """ConfigError for settings that this version does not know."""
    try:
        return msgspec.convert(served.suggested, Suggested)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The env server suggests settings that this Ludic does not know: {error}") from error
