"""The address of a server: checks of host and port before anything is loaded, and the URL of a listener."""

import asyncio
import socket

from ludic.types import ConfigError
from ludic.util.urls import is_loopback

_WITHOUT_KEY = (
    "Listening on {host!r} lets every client that reaches this machine use the model. Give an --api-key (or LUDIC_API_KEY), use "
    "127.0.0.1, or pass --insecure if you trust the network."
)


def check_host(host: str, has_key: object, insecure: bool = False, *, problem: str = _WITHOUT_KEY) -> None:
    """Refuse to let other machines in without a key, unless `insecure` allows it. `problem`: the message, with {host!r}."""
    if not (is_loopback(host) or has_key or insecure):
        raise ConfigError(problem.format(host=host))


def require_port(port: int) -> None:
    """ConfigError unless `--port` is one that a server can have; 0 is any free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}; a port is a number from 0 to 65535.")


def check_port(host: str, port: int) -> None:
    """Refuse a port in use: clients that wait for this server would reach another."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --port.") from error
        except (OverflowError, ValueError) as error:  # a port above 65535; an invalid host name
            raise ConfigError(f"Cannot listen on {host!r:.80}:{port}: {error}") from error


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def url_of(host: str, listener: asyncio.Server) -> str:
    """The address of a server; its port, if any free one was asked for."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.sockets[0].getsockname()[1]}"
