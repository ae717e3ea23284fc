"""Memory maps of games, as plain data: facts with their addresses, and milestones that facts reach.

A map also gives the characters of the tiles on screen. Maps for two games are built in (`pokemon_red`, and `demo` for the game in
demo_rom.py); your own is a JSON file of the same shape.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from ludic.types import ConfigError

ReadMemory: TypeAlias = Callable[[int, int], bytes]
"""(address, length) -> bytes."""


class Kind(StrEnum):
    """The conversion of a fact's bytes to a value."""

    NUMBER = "number"  # a whole number, the high byte first
    LITTLE = "little"  # a whole number, the low byte first
    DECIMAL = "decimal"  # two decimal digits per byte, as games store money
    BITS = "bits"  # how many bits are set
    BIT = "bit"  # whether one bit is set: 0 or 1
    TEXT = "text"  # letters of the game's own alphabet


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One value in memory."""

    address: int
    length: int = 1
    kind: Kind = Kind.NUMBER
    bit: int = 0
    """Number of the bit, counted from the lowest of the first byte, for Kind.BIT."""
    shown: bool = True
    """True if the agent sees it; hidden facts still count for milestones."""

    def __post_init__(self) -> None:
        if not 0 <= self.address <= 0xFFFF or self.length < 1 or not 0 <= self.bit < 8 * self.length:
            raise ConfigError(f"{self} is not in the memory of a Game Boy: 64 KB, and a bit within the length.")

    def value(self, read: ReadMemory, letters: Mapping[int, str]) -> int | str:
        data = read(self.address, self.length)
        match self.kind:
            case Kind.NUMBER:
                return int.from_bytes(data, "big")
            case Kind.LITTLE:
                return int.from_bytes(data, "little")
            case Kind.DECIMAL:
                return int(data.hex()) if data.hex().isdecimal() else 0  # no number yet: the game has not begun
            case Kind.BITS:
                return int.from_bytes(data, "big").bit_count()
            case Kind.BIT:
                return int.from_bytes(data, "little") >> self.bit & 1
            case Kind.TEXT:
                return "".join(letters.get(byte, "\0") for byte in data).split("\0")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Milestone:
    """A fact that has reached a value for the first time."""

    name: str
    fact: str
    """Its name in the memory map."""
    at_least: int = 1
    reward: float = 1.0
    is_end: bool = False
    """Reaching it ends the episode."""

    def is_reached(self, facts: Mapping[str, int | str]) -> bool:
        value = facts[self.fact]
        return isinstance(value, int) and value >= self.at_least


class Progress:
    """The milestones that have been reached in this episode."""

    def __init__(self, milestones: Sequence[Milestone], reached: Iterable[str] = ()) -> None:
        self._milestones = milestones
        self._reached = set(reached)

    @property
    def reached(self) -> list[str]:
        return [m.name for m in self._milestones if m.name in self._reached]

    @property
    def next(self) -> str | None:
        """The first one that is not reached."""
        return next((m.name for m in self._milestones if m.name not in self._reached), None)

    def update(self, facts: Mapping[str, int | str]) -> list[Milestone]:
        """The milestones reached now for the first time; they stay reached."""
        new = [m for m in self._milestones if m.name not in self._reached and m.is_reached(facts)]
        self._reached |= {m.name for m in new}
        return new


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMap:
    """Facts, milestones and tiles of one game."""

    name: str
    title: str = ""
    """The cartridge's title, by which the map is found."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    milestones: Sequence[Milestone] = ()
    letters: Mapping[int, str] = field(default_factory=dict)
    """Number of a tile -> its character. If empty, tiles are shown as numbers."""
    walkable: int | None = None
    """Address of the pointer (low byte first) to the list of walkable tiles, which ends with FF."""
    place: Sequence[str] = ()
    """The facts with the player's position: x, y, and the area if there are several."""
    hints: str = ""
    """For the system prompt."""
    route: Sequence[str] = ()
    """Presses from the start of the game to every milestone, if known."""

    @property
    def full_reward(self) -> float | None:
        return sum(m.reward for m in self.milestones) if self.route else None

    def __post_init__(self) -> None:
        wanted = {*(m.fact for m in self.milestones), *self.place}
        if missing := sorted(wanted - set(self.facts)):
            raise ConfigError(
                f"The memory map {self.name!r} uses the facts {missing}, which it does not have: {sorted(self.facts)}."
            )

    def read(self, memory: ReadMemory) -> dict[str, int | str]:
        """Every fact, shown or not."""
        return {name: fact.value(memory, self.letters) for name, fact in self.facts.items()}


def load_map(path: str | Path) -> MemoryMap:
    """A map from a JSON file: the fields of MemoryMap, with Fact and Milestone objects inside; addresses may be "0xD35E"."""
    try:
        data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the memory map {str(path)!r}: {error}.") from error
    try:
        data["facts"] = {name: Fact(**_fact(raw)) for name, raw in data.get("facts", {}).items()}
        data["milestones"] = [Milestone(**raw) for raw in data.get("milestones", [])]
        data["letters"] = {_number(tile): letter for tile, letter in data.get("letters", {}).items()}
        data["walkable"] = None if data.get("walkable") is None else _number(data["walkable"])
        return MemoryMap(**{"name": Path(path).stem, **data})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        known = ", ".join(f.name for f in fields(MemoryMap))
        raise ConfigError(
            f"{str(path)!r} is not a memory map: {error}. A map is one JSON object with {known}."
        ) from error


def _fact(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**raw, "address": _number(raw["address"]), "kind": Kind(raw.get("kind", "number"))}


def _number(value: int | str) -> int:
    return int(value, 0) if isinstance(value, str) else value
