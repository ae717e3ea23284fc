"""Engines of other plug-ins that `ludic serve` and `ludic gateway` use, by the entry-point group `ludic.servers`."""

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from ludic import plugins


class ServerEngine(Protocol):
    """An engine that is a program of its own, such as vLLM."""

    def serve(self, flags: Sequence[str], *, insecure: bool) -> NoReturn:
        """Replace this process by a server with these flags of the engine's own. Without `insecure`, other machines need a key."""

    def client(self, url: str) -> Any:
        """A client of the server at this URL, with its `servers`, `control_get` and `close`."""


def find_engine(name: str) -> ServerEngine:
    """The engine of that name; MissingPlugin if its plug-in is not installed."""
    point = plugins.find("servers", name)
    if point is None:
        raise plugins.missing(f"ludic_{name}", f"--engine {name}")
    engine: ServerEngine = point.load()
    return engine
