"""Roles on a Ray cluster: each is a Ray actor that runs the role's command on a machine of Ray's choice.

The supervisor restarts and stops the roles and shows their output, as on one machine. All
machines need the run folder under the same path (a shared disk), and this Python environment or Ray's runtime environments.
"""

import os
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ludic.cli.pipeline.processes import LocalProcesses
from ludic.cli.pipeline.supervisor import Role, Running
from ludic.types import ConfigError, MissingExtra
from ludic.types.urls import LOGINS_VARIABLE

_NODE_LOST = 134
"""Exit code of a role whose Ray actor is lost, with its machine or its worker."""
_ANSWER_WITHIN_S = 60.0
_NO_ROOM_AFTER_S = 30.0
_FROM_US = ("PYTHONPATH", "LUDIC_REDIS_URL", "LUDIC_SERVER", "LUDIC_CONTROL_TOKEN", LOGINS_VARIABLE, "OMP_NUM_THREADS")
"""Environment variables that the roles get from the launcher."""


class RoleRunner:
    """A Ray actor that runs one process of a role. If its worker is killed, die_with_parent.py ends the command."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)  # settings may hold relative paths
        self._processes = LocalProcesses(Path(tempfile.mkdtemp(prefix="ludic-ray-")))
        self._running: Running | None = None

    def start(self, role: Role) -> None:
        self._running = self._processes.start(role)

    def look(self) -> tuple[int | None, bytes]:
        """Exit code and new output in one call, because the supervisor polls ten times a second."""
        running = self._started()
        code = running.poll()
        return code, running.read()

    def terminate(self) -> None:
        self._started().terminate()

    def kill(self) -> None:
        self._started().kill()

    def _started(self) -> Running:
        assert self._running is not None, "start comes first"
        return self._running


class RayProcesses:
    """Starts roles on the cluster at `address`; output is also written to `logs` here."""

    def __init__(self, logs: Path, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ludic launch --ray") from error
        self._ray: Any = ray
        self._logs = logs
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self._is_ours = False
        self._environment = {name: os.environ[name] for name in _FROM_US if name in os.environ}

    def __enter__(self) -> "RayProcesses":
        self._logs.mkdir(parents=True, exist_ok=True)
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=self._address, log_to_driver=False)
                self._is_ours = True
            except (ConnectionError, ValueError) as error:
                raise ConfigError(
                    f"There is no Ray cluster at {self._address!r}: {error}. Start one (`ray start --head`), or give --ray-address."
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours:  # the connection; the cluster stays
            self._ray.shutdown()

    def start(self, role: Role) -> Running:
        options = {"num_cpus": role.num_cpus, "num_gpus": role.num_gpus}
        environment = {**self._environment, **role.environment}
        runner = self._ray.remote(RoleRunner).options(**options).remote(os.getcwd())
        started = runner.start.remote(Role(**{**vars(role), "environment": environment, "needs": ()}))
        return RayProcess(self._ray, runner, started, self._logs / f"{role.name}.log")


class RayProcess:
    """One process of a role on the cluster."""

    def __init__(self, ray: Any, runner: Any, started: Any, log: Path) -> None:
        self._ray, self._runner, self._started, self._log = ray, runner, started, log
        self._code: int | None = None
        self._output = b""
        self._say_at: float | None = time.monotonic() + _NO_ROOM_AFTER_S
        """When to report that Ray finds no machine; None: reported, or the role has started."""

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
            self._report_waiting()
            return
        self._say_at = None
        try:
            self._ray.get(self._started)
            self._code, new = self._ray.get(self._runner.look.remote(), timeout=_ANSWER_WITHIN_S)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
            new, self._code = f"ray: {error}\n".encode(), _NODE_LOST
        self._output += new

    def _report_waiting(self) -> None:
        if self._say_at is not None and time.monotonic() > self._say_at:
            self._say_at = None
            self._output += b"ray: waiting for a machine with room for it (see `ray status`)\n"
