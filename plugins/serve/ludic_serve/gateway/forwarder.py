"""Runs a command inside a sandbox and forwards its connections to the gateway: `forwarder.py SOCKET PORT FOLDER COMMAND…`.

The sandbox has no network, but ordinary clients want a TCP address: this program listens on 127.0.0.1:PORT of the sandbox and
copies bytes to and from the gateway's Unix socket, the only way out. It ends as the command ends. The sandbox's own Python (3.9 or
newer) runs its source, so it imports nothing of Ludic.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

PIECE = 1 << 16


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until either end closes; the end of the stream is passed on, so the gateway notices a client that hangs up."""
    with contextlib.suppress(OSError):  # the other direction notices too
        while data := source.recv(PIECE):
            target.sendall(data)
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def connect(client: socket.socket, path: str) -> None:
    with client, socket.socket(socket.AF_UNIX) as gateway:
        try:
            gateway.connect(path)
        except OSError:
            return  # the gateway is gone; the client sees a closed connection
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=copy, args=(gateway, client), daemon=True)
        back.start()
        copy(client, gateway)
        back.join()


def accept(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=connect, args=(client, path), daemon=True).start()


def run_command(listener: socket.socket, folder: str, argv: list) -> None:
    listener.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that would be inherited
    try:
        os.chdir(folder)
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def main() -> None:
    path, port, folder, *argv = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    child = os.fork()  # before the first thread
    if child == 0:
        run_command(listener, folder, argv)
    threading.Thread(target=accept, args=(listener, path), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:  # end by the same signal
        with contextlib.suppress(OSError):  # SIGKILL cannot be handled
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
