"""`ludic openenv-server`: one environment in OpenEnv's protocol, for its clients and for runs here. See docs/envs/openenv.md."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.args import EnvId, need_extras, parse
from ludic.cli.servers.stopping import DRAIN_S, serve_until_stopped
from ludic.envs.adapters.openenv.server import openenv_app
from ludic.inference.vllm.command import check_port, is_loopback
from ludic.interaction.base import AnyEnv
from ludic.run.config.entries import at_least
from ludic.run.given import env_factory
from ludic.run.settings import read_pair
from ludic.types import ConfigError

TOKEN_VARIABLE = "LUDIC_OPENENV_TOKEN"


@dataclass(frozen=True)
class OpenEnvServerArgs:
    """Serve an environment in OpenEnv's protocol: WebSocket sessions at /ws, MCP tools, /schema, /metadata, /health."""

    env: EnvId
    """Id of an environment (`ludic envs` lists them), or file.py:Class of your own. It has one agent."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Argument of the env; may be repeated."""
    data: Path | None = None
    """JSONL file of samples, for envs that ask questions; the seed of an episode picks one."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine, clients need the token in $LUDIC_OPENENV_TOKEN."""
    port: int = 8000
    """Port."""
    max_sessions: int = 64
    """Episodes at the same time."""
    drain_s: float = DRAIN_S
    """Seconds that sessions may go on after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}; a port is a number from 1 to 65535.")
        at_least(1, max_sessions=self.max_sessions)
        at_least(0, drain_s=self.drain_s)


def openenv_server(args: list[str]) -> int:
    given = parse(OpenEnvServerArgs, args, prog="ludic openenv-server")
    need_extras("openenv", "ludic openenv-server")
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(given.host):
        raise ConfigError(
            f"--host {given.host} is reached from other machines; set ${TOKEN_VARIABLE} to a secret first."
        )
    check_port(given.host, given.port)
    found, settings = env_factory(given.env), dict(map(read_pair, given.set))
    samples = [] if given.data is None else list(read_samples(given.data))

    def make(**sample: Any) -> AnyEnv:
        return found.make({**({} if sample else found.example), **settings, **sample})

    app = openenv_app(make, name=given.env, samples=samples, max_sessions=given.max_sessions, token=token)
    asyncio.run(serve_until_stopped(_serve(app, given)))
    print("Stopped.")
    return 0


async def _serve(app: Any, given: OpenEnvServerArgs) -> None:
    from ludic.inference.serving.app import AppServer
    from ludic.inference.serving.limits import ServerLimits, allow_many_files

    allow_many_files()
    # A session is a connection; the others are for /health, /schema and clients that are refused with a reason.
    others = ServerLimits().max_connections
    server = AppServer(app, ServerLimits(max_connections=given.max_sessions + others))
    url = await server.start(given.host, given.port)
    try:
        print(f"Serving {given.env} at {url} (Ctrl-C stops)", flush=True)
        await asyncio.Event().wait()
    finally:
        await server.close(given.drain_s)
