"""`ludic env-server`: envs in worker processes for runs on other machines. See docs/env-workers.md."""

import asyncio
import os
import secrets
from dataclasses import dataclass

import tyro

from ludic.cli.args import Switch, parse
from ludic.http.address import check_port, require_port
from ludic.run.config.entries import at_least
from ludic.util.stop import serve_until_stopped
from ludic.util.urls import is_loopback
from ludic_envs.workers import EnvServer
from ludic_envs.workers.server import TOKEN_VARIABLE


@dataclass(frozen=True)
class EnvServerArgs:
    """Hold envs for runs on other machines, which name this server: `ludic train ENV --env-server HOST:PORT`. The token is in
    $LUDIC_ENV_TOKEN on both sides; where it is not set, one is made and printed."""

    envs: tyro.conf.Positional[tuple[str, ...]]
    """Ids of envs (`ludic envs`), or file.py:Class. A client asks for them by the same name."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = 7700
    """Port; 0 takes a free one."""
    workers: int = os.cpu_count() or 1
    """Processes that hold the envs."""
    env_timeout: float = 600.0
    """Seconds after which a worker whose event loop stands still is killed; 0 is no limit."""
    env_memory_mb: int | None = None
    """Memory that the envs of one worker may allocate together. Default: no limit."""
    insecure: Switch = False
    """Admit clients without a token."""

    def __post_init__(self) -> None:
        require_port(self.port)
        at_least(0, env_timeout=self.env_timeout)
        at_least(1, workers=self.workers, env_memory_mb=self.env_memory_mb)


def env_server(args: list[str]) -> int:
    given = parse(EnvServerArgs, args, prog="ludic env-server")
    check_port(given.host, given.port)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if given.insecure:
        token = ""
    elif not token:
        token = secrets.token_urlsafe(24)
        print(f"export {TOKEN_VARIABLE}={token}   # for this server's clients", flush=True)
    server = EnvServer(
        given.envs,
        workers=given.workers,
        token=token,
        timeout_s=given.env_timeout or None,
        memory_mb=given.env_memory_mb,
    )

    def announce(address: str) -> None:
        reach = "this machine" if is_loopback(given.host) else "every machine that reaches it"
        print(
            f"Serving {', '.join(given.envs)} to {reach} at {address}, {given.workers} workers (Ctrl-C stops)",
            flush=True,
        )

    asyncio.run(serve_until_stopped(server.serve(given.host, given.port, on_ready=announce)))
    print("Stopped.")
    return 0
