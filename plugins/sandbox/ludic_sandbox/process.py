"""A child process on the event loop: its end is awaited through a pidfd.

asyncio's own subprocesses use a thread per child under Python 3.11, give the child a socket as stdin (which it cannot open as
/dev/stdin), and lose the exit code when a kill coincides with the child's end. Linux only, as sandboxes are.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


async def readable(fd: int) -> None:
    """Wait until the descriptor is readable; a pidfd is when its process has ended."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


class Process:
    """Made by `start_process`; its user must await `wait`."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
        pipes: Sequence[asyncio.BaseTransport],
    ) -> None:
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._pipes = pipes
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.returncode is None and os.waitid(os.P_PIDFD, self._pidfd, _LOOK) is None

    @property
    def returncode(self) -> int | None:
        """The return code of `subprocess`; None before `wait`."""
        return self._popen.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._popen.returncode is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for its end. Then its output can be read to the end, if no other process holds the pipes."""
        if self._popen.returncode is None:
            await readable(self._pidfd)
            self._popen.wait()
            os.close(self._pidfd)

    def close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()


async def start_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin_owner: int | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
    cwd: str | None = None,
) -> Process:
    """Start `argv` with three pipes. `stdin_owner` is the user that may open the child's stdin as /dev/stdin."""
    pipes = [os.pipe() for _ in range(3)]
    theirs = (pipes[0][0], pipes[1][1], pipes[2][1])
    ours = (pipes[0][1], pipes[1][0], pipes[2][0])
    opened: list[asyncio.BaseTransport] = []
    try:
        # Everything that can be cancelled comes before the child starts; a child must never be left without an owner.
        stdin = await _writer(ours[0], opened)
        stdout, stderr = await _reader(ours[1], opened), await _reader(ours[2], opened)
        if stdin_owner is not None:
            os.fchown(theirs[0], stdin_owner, stdin_owner)
        popen = subprocess.Popen(
            argv,
            stdin=theirs[0],
            stdout=theirs[1],
            stderr=theirs[2],
            env=env,
            pass_fds=pass_fds,
            start_new_session=new_session,
            cwd=cwd,
        )
    except BaseException:
        for transport in opened:
            transport.close()
        for fd in ours[len(opened) + 1 :]:  # without a transport; the one that was being opened closes itself
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    return Process(popen, stdin, stdout, stderr, opened)


async def _writer(fd: int, opened: list[asyncio.BaseTransport]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0))
    opened.append(transport)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _reader(fd: int, opened: list[asyncio.BaseTransport]) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    opened.append(transport)
    return reader
