"""The reports of `check_env`: a broken rule (`EnvCheckFailed`), or what the env costs and where it belongs (`EnvReport`)."""

import functools
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ludic.types import EnvContractError, Failure, LudicError

P = ParamSpec("P")
T = TypeVar("T")

_LONG_S = 0.005
"""Median time of a step from which on an env slows the other envs of its process."""
_LARGE_MB = 256


class EnvCheckFailed(EnvContractError):
    """An environment breaks the contract; the message says which part."""


def failed(env: object, what: str) -> EnvCheckFailed:
    return EnvCheckFailed(f"{type(env).__name__}: {what}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvReport:
    """The cost of an env. Printed, it says in two sentences what was measured and what suits the env."""

    env: str
    """Name of its class."""
    blocking: bool
    """True if its calls run in a thread (`LudicEnv.blocking`)."""
    is_async: bool
    """True if it has its own `async_` methods: time that it waits for is not lost for others."""
    num_steps: int
    reset_s: float
    """Median, as the next two."""
    step_s: float
    step_cpu_s: float
    """Share of a step that this process computes."""
    slowest_s: float
    """The longest reset or step."""
    memory_mb: float
    """Growth of this process's peak memory during the check; imports of the env's packages count."""

    @property
    def suits(self) -> str:
        """in process, or env workers."""
        return "env workers" if self._why_workers else "in process"

    @property
    def _why_workers(self) -> str:
        if not self.blocking and not self.is_async and self.step_s >= _LONG_S:
            return (
                f"a step holds the event loop for {_shown(self.step_s)}, and every other episode waits (blocking = True would run "
                "it in a thread)"
            )
        if self.step_cpu_s >= _LONG_S:
            return f"a step computes for {_shown(self.step_cpu_s)}, and all envs of one process share one core with the trainer"
        if self.memory_mb >= _LARGE_MB:
            return f"it takes {self.memory_mb:,.0f} MB, which a worker can be limited to (--env-memory-mb)"
        return ""

    def __str__(self) -> str:
        where = "in its thread" if self.blocking else "on the event loop"
        measured = (
            f"{self.env}: a step takes {_shown(self.step_s)} {where} (median of {self.num_steps}; slowest call "
            f"{_shown(self.slowest_s)}), a reset {_shown(self.reset_s)}."
        )
        if why := self._why_workers:
            return f"{measured} It suits env workers (--env-workers): {why}."
        return f"{measured} It suits this process; env workers are for envs that may crash or hang."


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


class StepClock:
    """Measures the calls of an env."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[float, float]]] = {"reset": [], "step": []}
        self._memory_mb = _peak_memory_mb()

    @contextmanager
    def timing(self, call: str) -> Iterator[None]:
        """Around one reset or step."""
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self._calls[call].append((time.perf_counter() - began, time.process_time() - cpu))

    def report(self, env: str, *, blocking: bool, is_async: bool) -> EnvReport:
        resets, steps = self._calls["reset"], self._calls["step"]
        return EnvReport(
            env=env,
            blocking=blocking,
            is_async=is_async,
            num_steps=len(steps),
            reset_s=_median(wall for wall, _ in resets),
            step_s=_median(wall for wall, _ in steps),
            step_cpu_s=_median(cpu for _, cpu in steps),
            slowest_s=max((wall for wall, _ in (*resets, *steps)), default=0.0),
            memory_mb=max(0.0, _peak_memory_mb() - self._memory_mb),
        )


def one_line_in_scripts(check: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Prints the message of a failed check that ends a script, and the lines of the env that raised instead of Ludic's."""

    @functools.wraps(check)
    async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await check(*args, **kwargs)
        except Exception as error:
            error._told = _told(error)  # type: ignore[attr-defined]
            if not isinstance(sys.excepthook, _Hook):
                sys.excepthook = _Hook(sys.excepthook)
            raise

    return checked


@dataclass(frozen=True, slots=True)
class _Hook:
    before: Callable[..., object]

    def __call__(self, *raised: Any) -> None:
        told = getattr(raised[1], "_told", None)
        if told is None:
            self.before(*raised)
        else:
            sys.stderr.write(told)


def _told(error: Exception) -> str:
    is_ours = isinstance(error, LudicError)
    cause = error.__cause__ if is_ours else error
    lines = "" if cause is None else Failure.from_exception(cause).user_traceback
    return lines if lines and not is_ours else f"{lines}{type(error).__name__}: {error}\n"


def _median(seconds: Iterable[float]) -> float:
    return statistics.median(list(seconds) or [0.0])


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
