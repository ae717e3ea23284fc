"""For tests of sandboxes: pools that need more than a constructor (a test is skipped where one cannot be used), and processes."""

import contextlib
import io
import subprocess
import tarfile
import uuid
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ludic_sandbox import BubblewrapSandboxPool, ContainerConfig, PodmanSandboxPool, SandboxLimits
from ludic_sandbox.containers import PodmanFacts, container_command, engine_problem
from ludic_sandbox.remote.client import RemoteSandboxPool
from ludic_sandbox.remote.server import SandboxServer

IMAGE = "localhost/ludic-host:latest"
"""An image without files: its containers see the host's /usr, so nothing has to be pulled."""
SHOW_USR = ("--volume", "/usr:/usr:ro")


def podman_config(limits: SandboxLimits | None = None) -> ContainerConfig:
    """Settings for podman with the host's Python; makes the image if it is missing."""
    if problem := podman_problem():
        pytest.skip(f"podman cannot be used: {problem}")
    return ContainerConfig(base_image=IMAGE, extra_args=SHOW_USR, limits=limits or SandboxLimits())


@cache
def podman_problem() -> str:
    """Why podman cannot run a container here: it may be installed in a container that has no right to do so."""
    if problem := engine_problem("podman"):
        return problem
    if subprocess.run(["podman", "image", "exists", IMAGE]).returncode != 0:
        subprocess.run(["podman", "import", "-", IMAGE], input=_image(), capture_output=True)
    probe = ContainerConfig(base_image=IMAGE, extra_args=("--rm", *PodmanFacts.read("podman").run_args, *SHOW_USR))
    command = container_command("podman", probe, f"probe-{uuid.uuid4().hex}", SandboxLimits())
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )  # its supervisor gets no job
    return "" if done.returncode == 0 else done.stderr.strip()[-500:]


def podman_pool(**settings: Any) -> PodmanSandboxPool:
    return PodmanSandboxPool(podman_config(), **settings)


@contextlib.asynccontextmanager
async def remote_pool(n_workers: int) -> AsyncIterator[RemoteSandboxPool]:
    """A pool whose programs run on a sandbox server; the server is in this process."""
    server = SandboxServer(BubblewrapSandboxPool(n_workers=n_workers), token="the-token")
    await server.start()
    try:
        async with RemoteSandboxPool(server.url, token="the-token") as pool:
            yield pool
    finally:
        await server.close()


def _image() -> bytes:
    """A tar archive with the folders and links of a root whose programs are below /usr."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for folder in ("usr", "proc", "sys", "dev", "tmp", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for link in (Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64")):
            if link.is_symlink():
                entry = tarfile.TarInfo(link.name)
                entry.type, entry.linkname = tarfile.SYMTYPE, str(link.readlink())
                tar.addfile(entry)
    return archive.getvalue()


def descendants(pid: int) -> list[int]:
    """Numbers of the processes below this one."""
    children = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, file.read_text().split())
    return [one for child in children for one in (child, *descendants(child))]
