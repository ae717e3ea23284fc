"""Communication between the ranks of one training run besides tensors, and how ranks fail together.

Control messages use gloo on the CPU, also where tensors use nccl: a rank may wait here for minutes while rank 0 evaluates,
and no GPU timeout runs meanwhile. A failing rank writes its error to the shared store for the others; a killed one
cannot, and the others find it by a roll call.
"""

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ludic.types import ConfigError, LudicError

T = TypeVar("T")

TIMEOUT_S = 7200.0
"""Default wait for another rank: longer than any evaluation should take."""
_ROLL_CALL_S = 5.0


class RankFailed(LudicError, RuntimeError):
    """Another rank has failed or is gone, and this one cannot continue without it."""


class Ranks:
    """The processes of one training run; this class itself is a run in a single process.

    All ranks call every method, in the same order.
    """

    rank = 0
    world_size = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks, by rank, on rank 0; None elsewhere."""
        return [value]

    def scatter(self, values: Sequence[T] | None) -> T:
        """Rank 0 sends one value to each rank."""
        assert values is not None, "rank 0 must pass values"
        return values[0]

    def broadcast(self, value: T | None) -> T:
        """The value of rank 0, on all ranks."""
        assert value is not None, "rank 0 must pass a value"
        return value

    def sum(self, value: float) -> float:
        return value

    def max(self, value: float) -> float:
        return value

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over ranks, in place."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks; raises with the names of those that are missing after the timeout."""

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Wrap work that uses collectives: a failure then names the failed rank, here and on the others."""
        return contextlib.nullcontext()


class ProcessRanks(Ranks):
    """All ranks of torch's default group."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long a rank waits for another before it fails."""
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s}; ranks need a positive time to wait for each other.")
        if not dist.is_initialized():
            raise ConfigError(
                "ProcessRanks needs torch's process group. Start the program with torchrun and call join_ranks()."
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        self._shared = dist.PrefixStore("ludic-ranks", dist.distributed_c10d._get_default_store())

    def gather(self, value: T) -> list[T] | None:
        with self.watching():
            found: list[Any] | None = [None] * self.world_size if self.is_first else None
            dist.gather_object(value, found, dst=0, group=self._control)
            return found

    def scatter(self, values: Sequence[T] | None) -> T:
        with self.watching():
            received: list[Any] = [None]
            dist.scatter_object_list(received, list(values) if values is not None else None, 0, group=self._control)
            own: T = received[0]
            return own

    def broadcast(self, value: T | None) -> T:
        with self.watching():
            values: list[Any] = [value]
            dist.broadcast_object_list(values, 0, group=self._control)
            common: T = values[0]
            return common

    def sum(self, value: float) -> float:
        return float(self._all(value).sum())

    def max(self, value: float) -> float:
        return float(self._all(value).max())

    def _all(self, value: float) -> Tensor:
        """The values of all ranks; each rank reduces them in the same order, so that all get the same result to the last bit."""
        with self.watching():
            found = torch.empty(self.world_size, dtype=torch.float64)
            own = torch.tensor([value], dtype=torch.float64)
            dist.all_gather(list(found.split(1)), own, group=self._control)
            return found

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        with self.watching():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def barrier(self, timeout_s: float | None = None) -> None:
        timeout = self._timeout if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        with self.watching():
            try:
                dist.monitored_barrier(self._control, timeout, wait_all_ranks=True)
            except RuntimeError as error:
                if _is_broken_connection(error):
                    raise
                raise RankFailed(
                    f"Not all ranks arrived within {timeout.total_seconds():g} s: {_first_line(error)}."
                ) from error

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except RankFailed:
            raise
        except Exception as error:
            if not _is_broken_connection(error):
                with contextlib.suppress(dist.DistError):  # the process that holds the store is gone
                    self._shared.set(f"failed-{self.rank}", f"{type(error).__name__}: {error}")
                raise
            raise RankFailed(f"{self._who_is_missing()} (Rank {self.rank} noticed: {_first_line(error)})") from error

    def _who_is_missing(self) -> str:
        """The failure that a rank has shared; else the ranks that do not respond to a roll call."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            self._shared.set(f"here-{self.rank}", "yes")
            end = time.monotonic() + _ROLL_CALL_S
            silent = others
            while silent and time.monotonic() < end:
                for rank in others:
                    if self._shared.check([f"failed-{rank}"]):
                        return f"Rank {rank} failed: {self._shared.get(f'failed-{rank}').decode()}"
                silent = [rank for rank in others if not self._shared.check([f"here-{rank}"])]
                time.sleep(0.05)
        except dist.DistError:
            return (
                "The process that holds the ranks' store (rank 0, or torchrun) is gone: killed, or its machine is lost."
            )
        if not silent:
            return "The connection between ranks broke, though all of them still run."
        listed = ", ".join(map(str, silent))
        return (
            f"Rank {listed} of {self.world_size} does not respond: it was killed (out of memory?), or its machine is lost. "
            "Restart the run from its last checkpoint; `torchrun --max-restarts` does so automatically."
        )


def _is_broken_connection(error: Exception) -> bool:
    """torch has no exception type for gloo's errors about a lost peer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Launch(NamedTuple):
    """The place of this process in torchrun's group."""

    rank: int
    local_rank: int
    world_size: int


def launched() -> _Launch | None:
    """None outside of torchrun (or a launcher that sets the same variables)."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in os.environ]
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return None
    if len(found) < len(names):
        raise ConfigError(
            f"{', '.join(sorted(found))} are set, but {', '.join(name for name in names if name not in found)} are not, so "
            "this process cannot find its group. Start it with torchrun, or unset them."
        )
    return _Launch(*(int(os.environ[name]) for name in names[:3]))


def join_ranks(*, timeout_s: float = TIMEOUT_S, device: str | None = None) -> Ranks:
    """Join the ranks that torchrun has started: nccl for GPUs, gloo for CPUs. Without torchrun: a single rank.

    `device`: "cpu" or "cuda"; default: the GPU of this process's local rank, if there are GPUs.
    """
    launch = launched()
    if launch is None:
        return Ranks()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        _take_gpu(launch)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=_store(), rank=launch.rank, world_size=launch.world_size)
    return ProcessRanks(timeout_s=timeout_s)


def _store() -> dist.Store:
    """The store where ranks exchange addresses. torchrun may keep it over a restart, so each attempt has its own prefix: ranks
    must not find the addresses of dead processes."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"ludic-attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _take_gpu(launch: _Launch) -> None:
    if launch.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Local rank {launch.local_rank} has no GPU: this machine has {torch.cuda.device_count()}. Start at most as many "
            "processes as GPUs (torchrun --nproc-per-node), or train on the CPU: join_ranks(device='cpu')."
        )
    torch.cuda.set_device(launch.local_rank)


def leave_ranks() -> None:
    """Close the group's connections at the end of a program."""
    if dist.is_initialized():
        dist.destroy_process_group()


def require_same(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Raise if ranks have different settings: they would train different things, or deadlock."""
    gathered = ranks.gather(dict(facts))
    problem = ranks.broadcast("" if gathered is None else difference(gathered))
    if problem:
        raise ConfigError(problem)


def difference(gathered: Sequence[Mapping[str, str]]) -> str:
    """The first fact that differs between ranks, as a sentence; empty if all agree."""
    first = gathered[0]
    for rank, facts in enumerate(gathered):
        for name in [*first, *(name for name in facts if name not in first)]:
            ours, theirs = first.get(name, "nothing"), facts.get(name, "nothing")
            if ours != theirs:
                return (
                    f"Ranks were started with different settings: {name} is {ours} on rank 0 and {theirs} on rank {rank}. "
                    "Start every rank with the same."
                )
    return ""


def check_together(ranks: Ranks, check: Callable[[], None]) -> None:
    """Run `check` on every rank; if it raises ConfigError on one, all ranks raise."""
    own: ConfigError | None = None
    try:
        check()
    except ConfigError as error:
        own = error
    gathered = ranks.gather("" if own is None else str(own))
    problems = (f"Rank {rank} cannot start: {text}" for rank, text in enumerate(gathered or ()) if text)
    problem = ranks.broadcast(next(problems, ""))
    if own is not None:
        raise own
    if problem:
        raise ConfigError(problem)
