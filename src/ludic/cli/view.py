"""`ludic view`: runs in a browser. `ludic show` and `ludic plot`: the same in a terminal. See docs/viewer.md."""

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from ludic.cli.args import parse
from ludic.types import ConfigError, MissingExtra


@dataclass(frozen=True)
class ViewArgs:
    """Look at the rollouts, tokens and metrics of runs in a browser, also while they train."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """A run folder, or the folder that runs are in."""
    port: int = 7711
    """Port; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback it wants a --token."""
    token: str | None = None
    """What a browser has to know (?token=…) and a script has to send as a bearer token. Default: $LUDIC_VIEW_TOKEN."""
    export: Path | None = None
    """Write one HTML file that opens without a server, and end."""
    json: str | None = None
    """Print the answer to a path of the API, such as /api/runs/x/steps, and end."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}; a port is a number from 0 to 65535.")


def view(args: list[str]) -> int:
    from ludic.view.index import Runs

    given = parse(ViewArgs, args, prog="ludic view")
    runs = Runs(given.runs)
    if given.json is not None:
        from ludic.view import api

        for id in runs.ids():
            if id in given.json:
                runs.get(id).refresh(float("inf"))
        json.dump(api.answer(runs, given.json), sys.stdout, indent=1)
        print()
        return 0
    try:
        from ludic.view.server import serve
    except ImportError as error:
        raise MissingExtra("view", "ludic view") from error
    token = given.token or os.environ.get("LUDIC_VIEW_TOKEN") or None

    def announce(address: str) -> None:
        print(f"{len(runs.ids())} runs of {runs.root} at {address} (Ctrl-C stops)", flush=True)

    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(serve(runs, given.host, given.port, token=token, on_ready=announce))
    print("Stopped.")
    return 0
