"""`Choices`: the actions of a discrete space by name, and reading one out of a reply."""

from collections.abc import Collection, Iterable, Sequence

from ludic.types import ConfigError


class Choices:
    """Actions 0 … n-1 (or from `start`) under their names, which default to their numbers."""

    def __init__(self, whose: str, num_actions: int, names: Sequence[str] | None, *, start: int = 0) -> None:
        numbers = range(start, start + num_actions)
        chosen = [str(number) for number in numbers] if names is None else list(names)
        if len(chosen) != num_actions or len(set(map(_folded, chosen))) != num_actions:
            raise ConfigError(f"{whose} has {num_actions} actions; action_names={chosen} must name each of them once.")
        self.by_number = dict(zip(numbers, chosen, strict=True))
        # A name goes before a number: people may call the second action "0".
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
