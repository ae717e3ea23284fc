"""`ludic sandbox-server`: sandboxes of this machine for harnesses on other machines. See docs/sandbox.md."""

import asyncio
from dataclasses import dataclass, fields
from pathlib import Path

from ludic.cli.args import need_extras, parse
from ludic.http.address import check_port, require_port
from ludic.http.tokens import find_token
from ludic.run.config.entries import at_least
from ludic.types import ConfigError
from ludic.util.stop import DRAIN_S, serve_until_stopped
from ludic_sandbox.backends import check_backend, make_pool

_TOKEN_VARIABLE = "LUDIC_SANDBOX_TOKEN"
_TOKEN_FOLDER = Path("runs/sandbox_server")


@dataclass(frozen=True)
class SandboxServerArgs:
    """Run untrusted programs for other machines: code envs and the python tool use it with --sandbox http://HOST:PORT."""

    host: str = "127.0.0.1"
    """Address to listen on. Every client needs the token; nothing is encrypted, so keep the port on a private network."""
    port: int = 8002
    """Port; 0 takes a free one."""
    backend: str = "auto"
    """Isolation of programs: bubblewrap, docker, podman, podman-hpc, apptainer; auto is the first that works."""
    workers: int | None = None
    """Programs that run at the same time. Default: one per core."""
    token_file: Path | None = None
    """File of mode 600 with the token. Default: $LUDIC_SANDBOX_TOKEN, else runs/sandbox_server/control_token, which is made."""
    max_timeout_s: float = 120.0
    """Longest time limit that a run may ask for."""
    max_memory_mb: int = 2048
    """Largest memory limit that a run may ask for."""
    max_processes: int = 256
    """Most processes that a command may ask for."""
    max_workspace_mb: int = 1024
    """Largest workspace that a command may ask for."""
    max_waiting: int = 1000
    """Runs that may wait; one more is refused, and its client tries again."""
    max_per_client: int = 256
    """Runs of one address that may wait or be in progress."""
    max_body_mb: int = 64
    """Size of one request: program, input and files."""
    drain_s: float = DRAIN_S
    """Seconds that runs in progress may continue after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        require_port(self.port)
        at_least(1, workers=self.workers)
        at_least(0, drain_s=self.drain_s)
        if "://" in self.backend:
            raise ConfigError(f"--backend {self.backend}: a sandbox server runs programs itself. Give a back end.")
        check_backend(self.backend)


def sandbox_server(args: list[str]) -> int:
    given = parse(SandboxServerArgs, args, prog="ludic sandbox-server")
    need_extras("endpoint", "ludic sandbox-server")
    check_port(given.host, given.port)
    asyncio.run(serve_until_stopped(_serve(given)))
    print("Stopped.")
    return 0


async def _serve(given: SandboxServerArgs) -> None:
    from ludic_sandbox.remote.server import RunLimits, SandboxServer

    limits = RunLimits(**{limit.name: getattr(given, limit.name) for limit in fields(RunLimits)})
    found = find_token(given.token_file, _TOKEN_VARIABLE, _TOKEN_FOLDER)
    pool = make_pool(backend=given.backend, n_workers=given.workers)
    server = SandboxServer(pool, token=found.token, limits=limits)
    await server.start(given.host, given.port)
    try:
        print(
            f"Sandbox server at {server.url}: {pool.num_workers} sandboxes, Python {pool.python_version} (Ctrl-C stops)\n"
            f"  token:   {found.file or f'${found.variable}'}\n"
            f"  client:  {_TOKEN_VARIABLE}=… ludic train ENV --sandbox {server.url}\n"
            f"  load:    curl {server.url}/health",
            flush=True,
        )
        await asyncio.Event().wait()
    finally:
        await server.close(given.drain_s)
