"""Shared by the adapters: an env that is copied by replaying it, values as JSON and text, action names, calls as actions, global
random state."""

import json
import random
import re
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ludic.envs.env import LudicEnv, world_of
from ludic.types import (
    JSON,
    ConfigError,
    Info,
    MissingPackage,
    Observation,
    ResetNeeded,
    Snapshot,
    StepOutcome,
    UnknownName,
    new_id,
)
from ludic.util.files import parse_json

_VERSION = 1


class ReplayedEnv(LudicEnv[str, Observation, str]):
    """Base of adapters whose inner env cannot be copied: a pickle or a snapshot holds the seed and the actions, and the copy
    replays them, which costs one more pass over the episode.

    Write `_begin`, `_advance` and `_to_act`, set `_roles`; keep objects that cannot be pickled in `_live` only.
    """

    kind: ClassVar[str]
    """Id in the catalogue; a snapshot belongs to it."""
    _live: Any = None
    """The wrapped env while it is open; `_begin` makes one if there is none."""
    _roles: list[str]
    _system_prompt: str | None = None
    _seed: int | None = None
    _obs: Mapping[str, Observation] = MappingProxyType({})

    @abstractmethod
    def _begin(self, seed: int) -> dict[str, tuple[Observation, Info]]:
        """Start an episode."""

    @abstractmethod
    def _advance(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        """One transition of a running episode."""

    @abstractmethod
    def _to_act(self) -> list[str]:
        """The agents that must act now, in an open env."""

    @property
    def agent_ids(self) -> list[str]:
        return list(self._roles)

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    @property
    def active_agents(self) -> list[str]:
        return [] if self._live is None else self._to_act()

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._seed = random.Random().randrange(2**31) if seed is None else seed
        self._episode_id = new_id()
        self._played: list[dict[str, str]] = []
        opening = self._begin(self._seed)
        self._obs = {agent_id: obs for agent_id, (obs, _) in opening.items()}
        return opening

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        self._played.append(dict(actions))
        outcomes = self._advance(actions)
        self._obs = {agent_id: outcome.obs for agent_id, outcome in outcomes.items()}
        return outcomes

    def current_obs(self) -> dict[str, Observation]:
        return dict(self._obs)

    async def async_close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def snapshot(self) -> Snapshot:
        if self._seed is None:
            raise ResetNeeded(f"{type(self).__name__} has no episode to take a snapshot of. Call reset first.")
        world: dict[str, JSON] = {"seed": self._seed, "played": [{**actions} for actions in self._played]}
        return self._snapshot(self.kind, _VERSION, world)

    def restore(self, snapshot: Snapshot) -> None:
        world = world_of(snapshot, kind=self.kind, version=_VERSION)
        self._replay(world["seed"], world["played"])
        self._episode_id = snapshot.episode_id

    def _replay(self, seed: int, played: list[dict[str, str]]) -> None:
        self.reset(seed=seed)
        for actions in played:
            self.step(actions)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_live"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._seed is not None:
            self._replay(self._seed, self._played)


# --- values as JSON and text, and action names ---

_MAX_NUMBERS = 256
"""An array with more numbers is a picture; a model needs another view of it."""
_COLOURS = {0: "grey", 1: "red", 2: "green", 3: "yellow", 4: "blue", 5: "magenta", 6: "cyan", 7: "white"}
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)


def as_json(value: Any) -> JSON:
    """A value as JSON; an object that is no number, text or container becomes its `repr`."""
    if isinstance(value, np.ndarray | np.generic):
        return as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, str | bool | int | float) else repr(value)


def as_text(value: Any) -> str:
    """An observation as text: a dict line by line, small arrays and tuples in brackets, floats with 4 digits."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {as_text(item)}" for name, item in value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(as_text(item) for item in value)})"
    if isinstance(value, np.ndarray):
        return _array_as_text(value)
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def board_or_text(value: Any) -> str:
    """Two planes of marks, mine and theirs, are a board of x and o; everything else as `as_text`."""
    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] == 2:
        return "\n".join(" ".join("x" if mine else "o" if theirs else "." for mine, theirs in row) for row in value)
    return as_text(value)


def _array_as_text(array: np.ndarray[Any, Any]) -> str:
    if array.size > _MAX_NUMBERS:
        raise ConfigError(
            f"An observation of shape {array.shape} is too large to be read as {array.size} numbers. Pass "
            "render=<a function from the observation to text>."
        )
    return np.array2string(array, precision=4, suppress_small=True, separator=", ", max_line_width=10_000)


def uncoloured(picture: str) -> str:
    """A terminal picture without control codes: a red S becomes [S:red], since colours carry meaning."""
    return _COLOURED.sub(lambda found: f"[{found[2]}:{_colour(found[1])}]", picture).strip("\n")


def _colour(codes: str) -> str:
    for code in map(int, filter(None, codes.split(";"))):
        if code // 10 in (3, 4, 9, 10):  # 30-37 and 90-97 colour the letter, 40-47 and 100-107 its background
            return _COLOURS.get(code % 10, "coloured")
    return "coloured"


class Choices:
    """Names of the actions 0 … n-1 (or from `start`) of a discrete space; they default to the numbers."""

    def __init__(self, whose: str, num_actions: int, names: Sequence[str] | None, *, start: int = 0) -> None:
        numbers = range(start, start + num_actions)
        chosen = [str(number) for number in numbers] if names is None else list(names)
        if len(chosen) != num_actions or len(set(map(_folded, chosen))) != num_actions:
            raise ConfigError(f"{whose} has {num_actions} actions; action_names={chosen} must name each of them once.")
        self.by_number = dict(zip(numbers, chosen, strict=True))
        # A name goes before a number: the second action may be called "0".
        self._by_text = {str(number): number for number in numbers} | {
            _folded(name): number for number, name in self.by_number.items()
        }

    def read(self, said: str, legal: Collection[int] | None = None) -> int | None:
        """The action that a reply names, in any case, or None; `legal` limits it to some."""
        number = self._by_text.get(_folded(said))
        return number if legal is None or number in legal else None

    def names(self, legal: Iterable[int] | None = None) -> list[str]:
        return [self.by_number[number] for number in (self.by_number if legal is None else legal)]


def _folded(text: str) -> str:
    return text.strip().casefold()


# --- actions that are function calls ---

Call: TypeAlias = tuple[str, dict[str, Any]]
"""Name of the function, arguments."""


def read_calls(action: str) -> list[Call] | None:
    """The calls of an action, `[{"name": …, "arguments": {…}}, …]`; None if it is another text."""
    try:
        found = parse_json(action)
    except ValueError:
        return None
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        if not (
            isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
        ):
            return None
    return [(call["name"], call["arguments"]) for call in calls]


# --- programs that write a benchmark's samples ---


def write_samples(read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
    """Write samples as JSONL to standard output; a missing package or a wrong name ends the program with its message."""
    try:
        for sample in read():
            sys.stdout.write(json.dumps(sample, ensure_ascii=False) + "\n")
    except (MissingPackage, UnknownName) as error:
        sys.exit(str(error))


# --- global random state ---

_GLOBAL_RANDOM = threading.RLock()


class GlobalRandom:
    """An episode's own random state, for packages that draw from the global generators of `random` and numpy.

    They get this state while the package computes, and their former state afterwards, so episodes do not disturb each other or
    other code. Only another thread that draws from them at that moment is affected.
    """

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        with _GLOBAL_RANDOM:
            former = random.getstate(), np.random.get_state()
            _install(self._state)
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                _install(former)


def _install(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
