"""Starts the roles of a launched run: as processes of this machine, or on the machines of a Ray cluster.

None outlives this process or the roles it needs (`ludic.util.processes`). On a cluster, all machines need the run folder under the
same path (a shared disk), and this Python environment or Ray's runtime environments.
"""

import contextlib
import os
import re
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from ludic.types import ConfigError, MissingExtra
from ludic.util.processes import ChildProcesses
from ludic.util.urls import LOGINS_VARIABLE
from ludic_pipeline.launch.supervisor import MACHINE_LOST, Role, Running


class LocalProcesses(ChildProcesses):
    """Starts roles as children of this process; their files (NAME.log, NAME.pid) are in `logs`."""

    def start_role(self, role: Role) -> Running:
        environment = {**os.environ, **role.environment}
        return self.start(role.name, role.command, environment, grace_s=role.stop_within_s, needs=role.needs)


# --- on a Ray cluster ---

_ANSWER_WITHIN_S = 60.0
_NO_ROOM_AFTER_S = 30.0
_FROM_US = ("PYTHONPATH", "LUDIC_REDIS_URL", "LUDIC_SERVER", "LUDIC_CONTROL_TOKEN", LOGINS_VARIABLE, "OMP_NUM_THREADS")
"""Environment variables that the roles get from the launcher."""


class _RoleRunner:
    """A Ray actor that runs one process of a role on a machine of Ray's choice. If its worker is killed, die_with_parent.py ends
    the command."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)  # settings may hold relative paths
        self._processes = LocalProcesses(Path(tempfile.mkdtemp(prefix="ludic-ray-")))
        self._running: Running

    def start(self, role: Role) -> str:
        """Start it; returns the id of this Ray node."""
        import ray

        self._running = self._processes.start_role(role)
        return str(ray.get_runtime_context().get_node_id())

    def look(self) -> tuple[int | None, bytes]:
        """Exit code and new output in one call, because the supervisor polls ten times a second."""
        code = self._running.poll()
        return code, self._running.read()

    def terminate(self) -> None:
        self._running.terminate()


class RayProcesses:
    """Starts roles on the cluster at `address`; output is also written to `logs` here."""

    def __init__(self, logs: Path, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ludic launch --ray") from error
        self._ray: Any = ray
        self._logs = logs
        self._is_ours = not ray.is_initialized()
        self._environment = {name: os.environ[name] for name in _FROM_US if name in os.environ}
        self._logs.mkdir(parents=True, exist_ok=True)
        address = address or os.environ.get("RAY_ADDRESS") or "auto"
        if self._is_ours:
            try:
                ray.init(address=address, log_to_driver=False)
            except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
                raise ConfigError(_why_not_connected(address, error)) from error

    def close(self) -> None:
        if self._is_ours:  # the connection; the cluster stays
            self._ray.shutdown()

    def start_role(self, role: Role) -> Running:
        options = {"num_cpus": role.num_cpus, "num_gpus": role.num_gpus, "resources": dict(role.resources)}
        environment = {**self._environment, **role.environment}
        runner = self._ray.remote(_RoleRunner).options(**options).remote(os.getcwd())
        started = runner.start.remote(Role(**{**vars(role), "environment": environment, "needs": ()}))
        return RayProcess(self._ray, runner, started, self._logs / f"{role.name}.log")


def _why_not_connected(address: str, error: Exception) -> str:
    """Ray says of a cluster that wants a token what it says of an address where nothing is."""
    if not isinstance(error, (ConnectionError, ValueError)):
        return f"The Ray cluster at {address!r} refused the connection: {error}"
    if found := re.search(r"([\w.-]+):(\d+)", f"{address} {error}"):
        with (
            contextlib.suppress(OSError, OverflowError),
            socket.create_connection((found[1], int(found[2])), timeout=5),
        ):
            return (
                f"{found[0]} answers, but Ray could not connect: {error} Does the cluster want a token (RAY_AUTH_MODE=token, the "
                "token in RAY_AUTH_TOKEN or ~/.ray/auth_token), or is it another program?"
            )
    return f"There is no Ray cluster at {address!r}: {error}. Start one (`ray start --head`), or give --ray-address."


class RayProcess:
    """One process of a role on the cluster."""

    def __init__(self, ray: Any, runner: Any, started: Any, log: Path) -> None:
        self._ray, self._runner, self._started, self._log = ray, runner, started, log
        self._code: int | None = None
        self._output = b""
        self._say_at: float | None = time.monotonic() + _NO_ROOM_AFTER_S
        """When to report that Ray finds no machine; None: reported, or the role has started."""
        self._node: str | None = None
        """The id of the Ray node that it runs on, once it has started."""
        self._asked: tuple[Any, float] | None = None
        """The answer that is awaited, and since when."""

    def poll(self) -> int | None:
        """The exit code; None also while Ray looks for a machine, which is not a failure of the role."""
        if self._code is None:
            self._look()
        return self._code

    def read(self) -> bytes:
        new, self._output = self._output, b""
        if new:
            with self._log.open("ab") as file:
                file.write(new)
        return new

    def terminate(self) -> None:
        if self._has_started():
            self._runner.terminate.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the worker; die_with_parent.py then ends the command."""
        self._ray.kill(self._runner)
        self._code = self._code if self._code is not None else 128 + 9

    def _has_started(self) -> bool:
        ready, _ = self._ray.wait([self._started], timeout=0)
        return bool(ready)

    def _look(self) -> None:
        if not self._has_started():
            if self._say_at is not None and time.monotonic() > self._say_at:
                self._say_at = None
                self._output += b"ray: waiting for a machine with room for it (see `ray status`)\n"
            return
        self._say_at = None
        try:
            if self._node is None:
                self._node = self._ray.get(self._started)
                self._output += f"ray: runs on {_address(self._ray, self._node)}\n".encode()
            self._ask()
        except self._ray.exceptions.RayActorError as error:
            self._lost(str(error))

    def _ask(self) -> None:
        """Look at the process without waiting for the answer: a machine out of reach must not keep us from the other roles."""
        if self._asked is None:
            self._asked = self._runner.look.remote(), time.monotonic()
        answer, asked_at = self._asked
        if self._ray.wait([answer], timeout=0)[0]:
            self._asked = None
            self._code, new = self._ray.get(answer)
            self._output += new
        elif time.monotonic() > asked_at + _ANSWER_WITHIN_S:
            self._lost(f"its machine has not answered for {_ANSWER_WITHIN_S:g} s")

    def _lost(self, why: str) -> None:
        self._code = MACHINE_LOST
        self._output += f"ray: {why}\n".encode()
        self._ray.kill(
            self._runner
        )  # a machine that was only out of reach must not run on at the same time as its successor


def _address(ray: Any, node: str) -> str:
    found = [each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node]
    return f"{found[0]} (node {node[:8]})" if found else f"node {node[:8]}"
