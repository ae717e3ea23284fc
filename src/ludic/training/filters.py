"""Sample filters: which items are trained on. True keeps an item.

Every named filter is a predicate and a factory of itself, so `drop_truncated`, `drop_truncated()` and
`drop_truncated(item)` all do what they look like. A filter reads `SAWItem.origin`; an item whose origin does not
state a fact is kept by the filters that drop, and dropped by those that keep.
"""

from collections.abc import Callable, Iterable
from typing import overload

from ludic.types import SampleFilter, SAWItem, Step, is_parse_failure


class NamedFilter:
    """A filter that may also be called without an item, and then gives itself."""

    def __init__(self, keeps: Callable[[SAWItem], bool]) -> None:
        self._keeps = keeps
        self.__name__ = keeps.__name__
        self.__doc__ = keeps.__doc__

    @overload
    def __call__(self) -> "NamedFilter": ...
    @overload
    def __call__(self, item: SAWItem) -> bool: ...
    def __call__(self, item: SAWItem | None = None) -> "NamedFilter | bool":
        return self if item is None else self._keeps(item)

    def __repr__(self) -> str:
        return self.__name__


@NamedFilter
def keep_all(item: SAWItem) -> bool:
    """Keep everything."""
    return True


@NamedFilter
def drop_truncated(item: SAWItem) -> bool:
    """Drop what a limit of the env or the protocol cut off."""
    return not item.origin.truncated


@NamedFilter
def drop_incomplete_completions(item: SAWItem) -> bool:
    """Drop replies that the model did not finish (it ran out of tokens)."""
    return item.origin.finish_reason != "length"


@NamedFilter
def drop_parse_errors(item: SAWItem) -> bool:
    """Drop replies that could not be read as an action."""
    return not item.origin.parse_error


@NamedFilter
def keep_env_steps(item: SAWItem) -> bool:
    """Keep turns that reached the env."""
    return item.origin.step_kind == "env"


@NamedFilter
def keep_agent_steps(item: SAWItem) -> bool:
    """Keep turns that ended with a model call and never reached the env."""
    return item.origin.step_kind == "agent"


def combine(*filters: SampleFilter) -> SampleFilter:
    """Keep what every filter keeps."""
    return lambda item: all(keeps(item) for keeps in filters)


def any_of(*filters: SampleFilter) -> SampleFilter:
    """Keep what at least one filter keeps."""
    return lambda item: any(keeps(item) for keeps in filters)


def apply_filter(items: Iterable[SAWItem], sample_filter: SampleFilter) -> list[SAWItem]:
    """The items that the filter keeps, in order."""
    return [item for item in items if sample_filter(item)]


def default_step_selector(step: Step) -> bool:
    """Steps that close a turn: env steps, and replies to the env that could not be read."""
    return step.kind == "env" or is_parse_failure(step)
