"""Whatever an env returns or raises costs its own episode at most: fuzzed over every field, place and way of running."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ludic.batch_gen.store import FinishedEpisodes
from ludic.types import StepOutcome, StopReason, load_rollouts
from ludic.types.steps import MAX_INFO_CHARS, MAX_OBS_CHARS, MAX_REWARD
from tests.fuzz import Fuzz
from tests.unit.batch_gen.parts import SeededEnv, Threaded, make_engine, request, summary


@dataclass(frozen=True)
class Odd:
    """Something unusual in one place of an episode."""

    place: str
    """A field of the outcome, `info of reset`, `obs of reset`, `reset` or `step` for all that they return, `raise`."""
    name: str
    make: Callable[[], Any]
    is_fine: bool = False
    """The episode succeeds nevertheless."""
    ends_programs: bool = False
    """Raised on the event loop it is Ctrl-C, or the loop's own business; it belongs to envs in threads."""


class Text(str):
    __slots__ = ()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even its text")


class Own(BaseException):
    pass


def circular() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info["self"] = [info]
    return info


def nested(depth: int) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for _ in range(depth):
        info = {"inner": info}
    return info


def endless() -> Iterator[int]:
    while True:
        yield 1


def recurse() -> Any:
    return recurse()


def raising(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


NOT_TEXT: list[Any] = [None, 5, b"bytes", ["a"], endless(), np.array(["a"]), StepOutcome]
FINE_TEXT = ["", "\x00", "\ud800 alone", Text("sub"), np.str_("numpy"), "ü" * 10, "x" * MAX_OBS_CHARS]
NOT_REWARDS: list[Any] = [
    1e300, -1e300, float("inf"), float("-inf"), float("nan"), np.float64("nan"), np.float32("inf"), 10**400, "1", None, [1.0],
    np.array([1.0]), Decimal(1), 1j, endless(), 2 * MAX_REWARD, np.str_("1"),
]  # fmt: skip
FINE_REWARDS: list[Any] = [True, np.bool_(True), np.float32(0.5), np.int64(3), Fraction(1, 3), -0.0, MAX_REWARD, 5e-324]
NOT_FLAGS: list[Any] = [None, "no", 2, -1, 0.5, np.array([True, False]), [], endless()]
FINE_FLAGS: list[Any] = [True, 1, np.bool_(True)]
NOT_INFOS: list[Any] = [
    None, [], "info", endless(), {"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {"a": np.arange(3)}, {"a": {1, 2}},
    {(1, 2): 3}, {"a": "x" * (MAX_INFO_CHARS + 1)}, {"a": b"bytes"}, {"a": StepOutcome}, {"a": np.float32("nan")},
]  # fmt: skip
FINE_INFOS: list[Any] = [
    {},
    {1: 2},
    {"a": np.float32(2)},
    {"a": (1, 2)},
    {"\ud800": "\udfff"},
    {"a": None},
    {"reward": 7},
    nested(50),
]
ERRORS: list[BaseException] = [
    RecursionError("deep"), MemoryError(), StopAsyncIteration(), Unprintable("x"), ValueError("\ud800"), ValueError("x" * 5_000_000),
    ExceptionGroup("two", [ValueError(1), TypeError(2)]), TimeoutError("mine"), ConnectionError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    OSError(28, "No space left on device"), NotImplementedError(), Exception(circular()), BrokenPipeError(), EOFError(), SystemExit(0),
    SystemExit("bye"), SystemExit(3), asyncio.CancelledError(), Own("base"), AssertionError(),
]  # fmt: skip
ENDING: list[BaseException] = [
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(1),
    BaseExceptionGroup("g", [KeyboardInterrupt()]),
]

ODDITIES = [
    *(Odd("obs", repr(v)[:30], lambda v=v: v) for v in NOT_TEXT),
    *(Odd("obs", repr(v)[:30], lambda v=v: v, is_fine=True) for v in FINE_TEXT),
    Odd("obs", "10 MB", lambda: "x" * 10_000_000),
    *(Odd("obs of reset", repr(v)[:30], lambda v=v: v) for v in NOT_TEXT),
    Odd("obs of reset", "10 MB", lambda: "x" * 10_000_000),
    Odd("obs of reset", "surrogate", lambda: "\ud800", is_fine=True),
    *(Odd("reward", repr(v)[:30], lambda v=v: v) for v in NOT_REWARDS),
    *(Odd("reward", repr(v)[:30], lambda v=v: v, is_fine=True) for v in FINE_REWARDS),
    *(Odd(flag, repr(v)[:30], lambda v=v: v) for v in NOT_FLAGS for flag in ("terminated", "truncated")),
    *(Odd("terminated", repr(v)[:30], lambda v=v: v, is_fine=True) for v in FINE_FLAGS),
    *(Odd(place, repr(v)[:30], lambda v=v: v) for v in NOT_INFOS for place in ("info", "info of reset")),
    *(Odd(place, repr(v)[:30], lambda v=v: v, is_fine=True) for v in FINE_INFOS for place in ("info", "info of reset")),
    *(Odd(place, "circular", circular) for place in ("info", "info of reset")),
    *(Odd(place, "nested deeply", lambda: nested(5000)) for place in ("info", "info of reset")),
    *(Odd(place, repr(v)[:30], lambda v=v: v) for v in (None, (), ("a",), ["a", {}], 1, endless()) for place in ("step", "reset")),
    *(Odd("raise", repr(e)[:30], raising(e)) for e in ERRORS),
    *(Odd("raise", repr(e)[:30], raising(e), ends_programs=True) for e in ENDING),
    Odd("raise", "endless recursion", recurse),
]  # fmt: skip


class OddEnv(SeededEnv):
    """A SeededEnv with one oddity."""

    def __init__(self, odd: Odd, at: str = "step") -> None:
        super().__init__()
        self.odd, self.at = odd, at
        self._maybe_raise("make")

    def _maybe_raise(self, at: str) -> None:
        if self.odd.place == "raise" and self.at == at:
            self.odd.make()

    def env_reset(self, *, seed=None):
        self._maybe_raise("reset")
        obs, info = super().env_reset(seed=seed)
        odd = {self.odd.place: self.odd.make()} if self.odd.place != "raise" else {}
        return odd["reset"] if "reset" in odd else (odd.get("obs of reset", obs), odd.get("info of reset", info))

    def env_step(self, action):
        self._maybe_raise("step")
        if self.odd.place == "step":
            return self.odd.make()
        outcome = StepOutcome("done", 0.5, terminated=True, info={"number": 3})
        if self.odd.place in ("obs", "reward", "terminated", "truncated", "info"):
            setattr(outcome, self.odd.place, self.odd.make())
        return outcome

    async def async_close(self) -> None:
        await super().async_close()
        self._maybe_raise("close")


class OnLoop(OddEnv):
    blocking = False


class Awaited(OddEnv):
    async def async_env_reset(self, *, seed=None):
        await asyncio.sleep(0)
        return self.env_reset(seed=seed)

    async def async_env_step(self, action):
        await asyncio.sleep(0)
        return self.env_step(action)


HONEST = [request(env_seed=n, sampling_seed=n) for n in range(3)]


def strict(line: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture
async def alone():
    return [row[1:] for row in summary(await make_engine().generate_rollouts(HONEST, max_steps=1))]


async def check(odd: Odd, cls: type[OddEnv], at: str, path, alone, where: str) -> None:
    path.unlink(missing_ok=True)
    seen = []
    engine = make_engine(
        env_registry={"odd": cls, "seeded": Threaded},
        jsonl_path=path,
        max_retries=0,
        max_failed_share=1,
        on_progress=seen.append,
    )
    asked = [HONEST[0], request("odd", {"odd": odd, "at": at}, env_seed=7, sampling_seed=7), *HONEST[1:]]
    rollouts = await asyncio.wait_for(engine.generate_rollouts(asked, max_steps=1), 60)
    assert seen[-1].num_done == 4 and seen[-1].num_failed == (not odd.is_fine), where
    broken = [r for r in rollouts if r.meta["engine"]["env_kind"] == "odd"]
    assert [r.meta["episode_idx"] for r in broken][:1] == [1], where
    assert any(r.failure is not None for r in broken) == (not odd.is_fine), where
    assert any(r.stop is StopReason.FAILED for r in broken) == (not odd.is_fine), where
    honest = [r for r in rollouts if r not in broken]
    assert [row[1:] for row in summary(honest)] == alone, where
    lines = path.read_text("ascii").splitlines()
    assert len(lines) == len(rollouts) and all(strict(line)["format"] == 1 for line in lines), where
    stored = {r.id: r for r in load_rollouts(path)}
    assert all(stored[r.id].total_reward == r.total_reward for r in rollouts), where
    assert all([s.info for s in stored[r.id].steps] == [s.info for s in r.steps] for r in rollouts), where
    FinishedEpisodes(path)  # what `resume` reads


async def test_whatever_an_env_returns_or_raises_costs_its_own_episode_at_most(fuzz: Fuzz, tmp_path, alone, caplog):
    caplog.set_level("CRITICAL")
    for case in range(fuzz.cases(len(ODDITIES), least=len(ODDITIES))):
        rng = fuzz.rng(case)
        odd = ODDITIES[case] if case < len(ODDITIES) else rng.choice(ODDITIES)
        cls = OddEnv if odd.ends_programs else rng.choice([OddEnv, OddEnv, OnLoop, Awaited])
        at = rng.choice(
            ["make", "reset", "step", "close"] if cls is OddEnv and not odd.ends_programs else ["reset", "step"]
        )
        where = f"{odd.place} {odd.name} at {at} of {cls.__name__}: {fuzz.at(case)}"
        try:
            await check(odd, cls, at, tmp_path / "rollouts.jsonl", alone, where)
        except Exception as error:
            raise AssertionError(where) from error
