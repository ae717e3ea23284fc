"""Progress: milestones that facts reach, each counted once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Milestone:
    """Something worth reaching once: a fact that has grown to a value."""

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
    """Which milestones have been reached in this episode."""

    def __init__(self, milestones: Sequence[Milestone], reached: Iterable[str] = ()) -> None:
        self._milestones = milestones
        self._reached = set(reached)

    @property
    def reached(self) -> list[str]:
        return [m.name for m in self._milestones if m.name in self._reached]

    @property
    def next(self) -> str | None:
        """The first one that is open."""
        return next((m.name for m in self._milestones if m.name not in self._reached), None)

    def update(self, facts: Mapping[str, int | str]) -> list[Milestone]:
        """Those that are reached now for the first time; what is lost again later stays reached."""
        new = [m for m in self._milestones if m.name not in self._reached and m.is_reached(facts)]
        self._reached |= {m.name for m in new}
        return new
