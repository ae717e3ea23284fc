"""`GatewayPool`: the servers that the episodes of one agent share, one per event loop and set of policies.

The first episode starts a server; it ends with its loop, or when the run closes the pool.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ludic_serve.gateway.session import Policy

_CLOSE_S = 10.0
_serving: set[asyncio.Task[None]] = set()
"""The tasks of all pools, which an event loop refers to only weakly: they outlive an agent that is dropped."""
_SYSTEM_FILES = {
    "passwd": "agent:x:65534:65534:agent:/tmp:/bin/sh\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
"""Files that a sandboxed command sees next to the socket: some clients look up their user and localhost."""


class GatewayPool:
    """The running gateways of an agent. A closed pool starts new ones for later episodes."""

    def __init__(self, *, needs_socket: bool, on_end: Callable[[], Awaitable[None]]) -> None:
        """`needs_socket`: the agent connects over a Unix socket. `on_end` frees what the episodes of a server shared."""
        self._needs_socket, self._on_end = needs_socket, on_end
        self._hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], _GatewayHost]] = (
            WeakKeyDictionary()
        )

    def __len__(self) -> int:
        """Number of gateways that run."""
        return sum(map(len, self._hosts.values()))

    async def host(self, trained: Policy, policies: Mapping[str, Policy]) -> "_GatewayHost":
        """The running gateway of these policies in this event loop."""
        loop = asyncio.get_running_loop()
        key = (id(trained.client), trained.model, *((name, id(policy)) for name, policy in policies.items()))
        of_loop = self._hosts.setdefault(loop, {})
        if key not in of_loop:
            of_loop[key] = _GatewayHost(trained, policies, needs_socket=self._needs_socket)
            of_loop[key].task = task = loop.create_task(self._serve(of_loop[key], key))
            _serving.add(task)
            task.add_done_callback(_serving.discard)
        host = of_loop[key]
        await asyncio.shield(host.started)
        return host

    async def _serve(self, host: "_GatewayHost", key: tuple[Any, ...]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await host.serve(self._on_end)
        finally:
            of_loop = self._hosts.get(loop, {})
            of_loop.pop(key, None)
            if not of_loop:  # its values refer to the loop, which would never be freed
                self._hosts.pop(loop, None)

    def close(self) -> None:
        """End the gateways in all event loops, and wait for it; a run calls it before it closes the policy's client."""
        for loop, of_loop in list(self._hosts.items()):
            for host in [] if loop.is_closed() else list(of_loop.values()):
                if not loop.is_running():
                    host.task.cancel()  # ends when its loop runs again
                    continue
                with contextlib.suppress(RuntimeError):  # the loop has just been closed, and the server with it
                    waiting = asyncio.run_coroutine_threadsafe(host.end(), loop)
                    if not _runs_here(loop):
                        waiting.result(_CLOSE_S)


class _GatewayHost:
    """One gateway and its Unix socket, served by a task of its event loop until that is cancelled."""

    task: asyncio.Task[None]

    def __init__(self, trained: Policy, policies: Mapping[str, Policy], *, needs_socket: bool) -> None:
        from ludic_serve.gateway.server import Gateway  # needs the extra "serve"

        # The trained policy first: its main thread is the episode's.
        self.gateway = Gateway({trained.model: trained, **policies}, default=trained.model)
        self.socket: Path | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._needs_socket = needs_socket

    async def serve(self, on_end: Callable[[], Awaitable[None]]) -> None:
        """Serve until cancelled."""
        try:
            with tempfile.TemporaryDirectory(prefix="ludic-gateway-") as folder:  # of this user only
                try:
                    await self._start(Path(folder))
                    self.started.set_result(None)
                    await asyncio.Event().wait()
                finally:
                    await self.gateway.close()
                    await on_end()
        except Exception as error:
            if self.started.done():
                raise
            self.started.set_exception(error)
        finally:
            self.started.cancel()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _start(self, folder: Path) -> None:
        if not self._needs_socket:
            await self.gateway.start()
            return
        self.socket = folder / "gateway.sock"
        await self.gateway.start(unix_socket=self.socket)
        self.socket.chmod(0o666)  # a sandboxed command may be another user; the folder keeps others of the host away
        for name, text in _SYSTEM_FILES.items():
            (folder / name).write_text(text)
            os.chmod(folder / name, 0o644)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
