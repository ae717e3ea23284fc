"""A Python interpreter that has imported torch, or vLLM, before it starts: `executable()` is a program with Python's command line.

The program asks a server, over a socket, to fork a process that runs the command with the program's folder, variables and
streams. Signals go to that process, its end is the program's end, and killing the program kills the process and its group. Use
it where a program under test starts interpreters itself (a launcher its roles, torchrun its ranks). An interpreter flag that it
does not know makes it an ordinary Python. Only the standard library is imported here, because vLLM's interpreter runs this file.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HARMLESS = ("-u", "-P")
"""Flags of the interpreter that a forked process can honour."""
MAX_FILES = 128
"""Open files with lower numbers are inherited."""
STAYS = "LUDIC_TESTS_STAY_WARM"
"""The variable with which such a process starts interpreters of its kind itself: it is their `sys.executable`."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@functools.cache
def executable() -> str:
    """The program for this process's own interpreter."""
    from tests import forked

    path, program = socket_and_program(sys.executable)
    forked.call(serve, path, name="warm Python")
    return program


def socket_and_program(python: str) -> tuple[str, str]:
    """Where a server is to listen, and the program that connects to it."""
    folder = Path(tempfile.mkdtemp(prefix="ludic-warm-"))
    path, program = folder / "socket", folder / "python"
    program.write_text(f'#!/bin/sh\nexec {python} -I -S {__file__} {path} {python} "$@"\n')
    program.chmod(0o755)
    return str(path), str(program)


# --- the program ---


def main(path: str, python: str, *arguments: str) -> None:
    flags = [word for word in arguments[:2] if word in HARMLESS]
    command = arguments[len(flags) :]
    if not command or (command[0].startswith("-") and command[0] not in ("-m", "-c")):
        os.execv(python, [python, *arguments])
    files = [number for number in range(MAX_FILES) if is_open(number)]
    connection = connected(path)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    process = {"command": command, "flags": flags, "cwd": os.getcwd(), "environ": dict(os.environ), "files": files}
    request = json.dumps(process).encode()
    socket.send_fds(connection, [struct.pack("!I", len(request))], files)
    connection.sendall(request)
    (code,) = struct.unpack("!i", connection.recv(4) or struct.pack("!i", 1))  # nothing: the server has ended
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def connected(path: str) -> socket.socket:
    """A server that is still importing listens already; one that has just been started may not."""
    for _ in range(1200):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            return connection
        threading.Event().wait(0.05)
    raise TimeoutError(f"There is no server at {path}.")


# --- the server ---


def listening(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    return server


def serve(path: str, server: socket.socket | None = None) -> None:
    """Fork a process for each connection, until this process is terminated or its parent is gone."""
    server = server or listening(path)
    parent = os.getppid()
    alive: dict[int, socket.socket] = {}

    def end(*_: object) -> None:
        for pid in alive:
            kill(pid, signal.SIGKILL)
        os._exit(0)

    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in selector.select(timeout=5.0):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    if pid := begin(connection):
                        alive[pid] = connection
                        selector.register(connection, selectors.EVENT_READ, pid)
                elif key.fileobj == woken:
                    os.read(woken, 1024)
                elif key.data in alive:
                    number = receive(alive[key.data])
                    kill(key.data, number or signal.SIGKILL)
                    if not number:  # the program was killed
                        selector.unregister(key.fileobj)
            for pid in [*alive]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    connection = alive.pop(pid)
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    with contextlib.suppress(OSError):
                        connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                    connection.close()
    end()


def kill(pid: int, number: int) -> None:
    """Only SIGKILL goes to the children as well."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)


def receive(connection: socket.socket) -> int:
    try:
        return (connection.recv(1) or b"\0")[0]
    except ConnectionResetError:
        return 0


def begin(connection: socket.socket) -> int:
    """The pid of a new process, or 0; the new process itself never returns."""
    size, files, _, _ = socket.recv_fds(connection, 4, MAX_FILES)
    request = b""
    while size and len(request) < struct.unpack("!I", size)[0]:
        more = connection.recv(1 << 20)
        if not more:  # the program was killed before it had asked
            return 0
        request += more
    pid = os.fork() if size else 0
    if pid or not size:
        for file in files:
            os.close(file)
        return pid
    code = 1
    try:
        gc.freeze()  # a pass over what the server has imported would copy all of its pages
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        process = json.loads(request)
        inherit(files, process.pop("files"))
        code = run(**process)
    finally:
        os._exit(code)


def inherit(files: list[int], numbers: list[int]) -> None:
    """Have these files under these numbers, and no other file of the server."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 4 * MAX_FILES) for file in files]
    os.closerange(3, 4 * MAX_FILES)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)


def run(command: list[str], flags: list[str], cwd: str, environ: dict[str, str]) -> int:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.executable = environ.get(STAYS, sys.executable)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_safe_path = "-P" in flags
    code: Any = 0
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path[:0] = [] if is_safe_path else [cwd]
            sys.modules.pop(command[1], None)  # it may be among what was imported
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            sys.path[:0] = [] if is_safe_path else [""]
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            sys.path[:0] = [] if is_safe_path else [str(Path(command[0]).parent)]
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code
    except BaseException:  # noqa: BLE001 - an interpreter shows whatever ends it
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, like the end of an interpreter
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return (code or 0) & 0xFF


if __name__ == "__main__":
    main(*sys.argv[1:])
