"""`Feature`: something that a run may have, declared in one place.

A feature says when it is on, which others it excludes or needs, where it acts, and how `--dry-run` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludic.run.config.run_config import RunConfig
    from ludic.run.given import Parts
    from ludic.run.resolve import ResolvedRun
    from ludic.training import RLAlgorithm
    from ludic.types import BatchSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """The parts of a run's generation that are ready when features are put around its source of batches."""

    tokenizer: Any
    algorithm: RLAlgorithm
    closing: ExitStack
    """Closed with the run."""


class Feature:
    """One thing that a run may have beyond the plain loop."""

    name: str = ""
    """Its name in messages and in declarations of other features: a setting, a section or an argument of `build`."""
    section: str = ""
    """Section of the settings file that this feature of a plug-in adds; its flags are the fields of `Settings`."""
    Settings: type[Any] | None = None
    """Dataclass of that section."""
    excludes: Mapping[str, str] = {}
    """Name of another feature -> why the two exclude each other, or what to do instead. One of the two declares it."""
    needs: Mapping[str, str] = {}
    """Name of a feature without which this one cannot work -> why."""

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        """Whether a run with these settings and objects has it."""
        raise NotImplementedError(f"{type(self).__name__}.is_on")

    def shown(self, config: RunConfig) -> str:
        """Its name in a message, with the value of its setting where that helps."""
        return self.name

    def check(self, run: ResolvedRun) -> None:
        """ConfigError for what cannot work, before weights are loaded. Called where the feature is on."""

    def wrap(self, run: ResolvedRun, source: BatchSource, around: Around) -> BatchSource:
        """The source of batches with this feature around it. Called where the feature is on."""
        return source

    def says(self, run: ResolvedRun) -> list[str]:
        """Its sentences in the plan of `--dry-run`. Called where the feature is on."""
        return []


class Fact(Feature):
    """A setting or an object that takes part in pairs, and acts elsewhere."""

    def __init__(
        self,
        name: str,
        is_on: Callable[[RunConfig, Parts], Any],
        *,
        excludes: Mapping[str, str] | None = None,
        needs: Mapping[str, str] | None = None,
        shown: Callable[[RunConfig], str] | None = None,
        says: Callable[[ResolvedRun], str] | None = None,
    ) -> None:
        self.name = name
        self._is_on, self._shown, self._says = is_on, shown, says
        self.excludes, self.needs = excludes or {}, needs or {}

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(self._is_on(config, parts))

    def shown(self, config: RunConfig) -> str:
        return self.name if self._shown is None else self._shown(config)

    def says(self, run: ResolvedRun) -> list[str]:
        return [] if self._says is None else [self._says(run)]


def because(why: str, *names: str) -> dict[str, str]:
    """`excludes` of several features for the same reason."""
    return dict.fromkeys(names, why)
