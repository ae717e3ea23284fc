"""Memory cgroups: limit and measure the memory of all processes of a runner together. Needs root.

RLIMIT_AS alone is per process, so a program with 32 processes would have 32 times its memory. Groups are reused, one runner at a
time, since making and removing one takes the kernel longer than a run. Supports cgroups v1 and v2; without either (`memory_groups`
returns None) only RLIMIT_AS limits memory.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)
_NAME = "ludic-sandbox"
_numbers = itertools.count()
_REMOVE_TRIES, _REMOVE_PAUSE_S = 100, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The file names of one version of cgroups."""

    limit: str
    swap_limit: str
    swap_counts_memory: bool
    """v1 limits memory and swap together, v2 swap alone."""
    peak: str
    peak_reset: bool
    """True if writing to `peak` starts a new measurement."""
    events: str
    """Holds a line "oom_kill N"."""


V1 = Dialect(
    limit="memory.limit_in_bytes", swap_limit="memory.memsw.limit_in_bytes", swap_counts_memory=True,
    peak="memory.max_usage_in_bytes", peak_reset=True, events="memory.oom_control",
)  # fmt: skip
V2 = Dialect(
    limit="memory.max", swap_limit="memory.swap.max", swap_counts_memory=False,
    peak="memory.peak", peak_reset=False, events="memory.events",
)  # fmt: skip


class MemoryGroup:
    """One group, used by one runner at a time."""

    def __init__(self, folder: Path, dialect: Dialect) -> None:
        self.folder = folder
        self._dialect = dialect
        self._kills_before = 0

    @property
    def procs(self) -> Path:
        """The file to which a process writes in order to join."""
        return self.folder / "cgroup.procs"

    def begin(self, limit_bytes: int) -> None:
        """Set the limit and start measuring."""
        self._set_limit(limit_bytes)
        if self._dialect.peak_reset:
            self._write(self._dialect.peak, 0)
        self._kills_before = self._kills()

    def read(self) -> tuple[int | None, bool]:
        """Peak bytes since `begin` (None if this kernel does not measure it), and whether a process was killed for memory."""
        peak = self.folder / self._dialect.peak
        is_of_this_run = self._dialect.peak_reset and peak.exists()
        return (int(peak.read_text()) if is_of_this_run else None), self._kills() > self._kills_before

    async def remove(self) -> None:
        """Retries, since the kernel notices late that a group is empty. A later start removes what is left."""
        for _ in range(_REMOVE_TRIES):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            await asyncio.sleep(_REMOVE_PAUSE_S)

    def _set_limit(self, limit_bytes: int) -> None:
        swap = self._dialect.swap_limit
        if not (self.folder / swap).exists():
            self._write(self._dialect.limit, limit_bytes)
        elif self._dialect.swap_counts_memory:
            self._write(swap, -1)  # the sum must not be below the memory limit, so it is raised first
            self._write(self._dialect.limit, limit_bytes)
            self._write(swap, limit_bytes)
        else:
            self._write(swap, 0)
            self._write(self._dialect.limit, limit_bytes)

    def _kills(self) -> int:
        for line in (self.folder / self._dialect.events).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))


class MemoryGroups:
    """Lends groups, and makes one when none is free."""

    def __init__(self, parent: Path, dialect: Dialect) -> None:
        self._parent = parent
        self._dialect = dialect
        self._free: list[MemoryGroup] = []

    def lend(self) -> MemoryGroup:
        if self._free:
            return self._free.pop()
        folder = self._parent / f"{os.getpid()}-{_pid_namespace()}-{next(_numbers)}"
        folder.mkdir()
        return MemoryGroup(folder, self._dialect)

    def give_back(self, group: MemoryGroup) -> None:
        self._free.append(group)

    async def remove_all(self) -> None:
        """Remove the groups that no run uses."""
        while self._free:
            await self._free.pop().remove()


@cache
def _usable_parent(root: Path = Path("/sys/fs/cgroup")) -> tuple[Path, Dialect] | None:
    for base, dialect in ((root / "memory", V1), (root, V2)):
        parent = base / _NAME
        try:
            if dialect is V2:
                if "memory" not in (base / "cgroup.subtree_control").read_text().split():
                    continue
                parent.mkdir(exist_ok=True)
                (parent / "cgroup.subtree_control").write_text("+memory")
            elif not (base / V1.limit).exists():
                continue
            parent.mkdir(exist_ok=True)
            _remove_leftovers(parent)
            return parent, dialect
        except OSError as e:
            logger.debug("no memory cgroup below %s: %s", base, e)
    return None


def _remove_leftovers(parent: Path) -> None:
    """Remove groups of processes that were killed, and a bwrap that may still be in them."""
    for folder in parent.iterdir():
        owner, _, rest = folder.name.partition("-")
        # Process numbers are valid only within their namespace: the owner may be alive in another container.
        if not folder.is_dir() or not rest.startswith(f"{_pid_namespace()}-") or Path("/proc", owner).exists():
            continue
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):  # busy until they are gone; the next start removes it
            folder.rmdir()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def memory_groups() -> MemoryGroups | None:
    """Groups for one pool, or None if there are none."""
    found = _usable_parent() if os.geteuid() == 0 else None
    return MemoryGroups(*found) if found else None
