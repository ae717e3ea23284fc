"""`Feature`: something that a run may have, declared in one place.

A feature says when it is on, which others it excludes or needs, where it acts, and how `--dry-run` describes it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ludic.plugins import STALE, find, is_stale, points
from ludic.types import ConfigError, UnknownName
from ludic.types.errors import MissingPlugin

if TYPE_CHECKING:
    from ludic.run.config.run_config import RunConfig
    from ludic.run.given import Parts
    from ludic.run.resolve import ResolvedRun
    from ludic.run.session import Session
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
        """True if a run with these settings and objects has it."""
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


GROUP = "features"
"""Entry points `ludic.features`."""


def plugged(name: str, needed_for: str) -> Any:
    """The feature that a plug-in registers under this name; an error that says what to install if there is none."""
    point = find(GROUP, name)
    if point is None:
        advice = (
            STALE if is_stale(GROUP, name) else f"Install a package with the entry point {name!r} in ludic.{GROUP}."
        )
        raise ConfigError(f"{needed_for} needs the feature {name!r}, which no installed package has. {advice}")
    try:
        return point.load()
    except MissingPlugin as error:
        raise MissingPlugin(error.package, needed_for) from error


def plugin_features() -> list[Feature]:
    """The features of all plug-ins that are installed."""
    return [made for made in _found().values() if made is not None]


def added_sections() -> dict[str, type[Any] | None]:
    """Sections of the settings that plug-ins add -> their dataclasses; None for those of a plug-in that is not installed."""
    sections = {made.section: made.Settings for made in plugin_features() if made.section}
    return sections | {name: None for name, made in _found().items() if made is None}


@functools.cache
def _found() -> dict[str, Feature | None]:
    """Name of an entry point -> its feature; None where its package is not installed."""
    return {name: _loaded(name) for name in dict.fromkeys(point.name for point in points(GROUP))}


def _loaded(name: str) -> Feature | None:
    point = find(GROUP, name)
    try:
        made: Feature | None = None if point is None else point.load()
    except MissingPlugin:
        return None
    return made


class Engine(Feature):
    """Generates the samples of a run. The entry point of one in a plug-in has the name that the setting `engine` has."""

    engine: ClassVar[str]
    """Its name in the settings."""
    session: ClassVar[str]
    """module:Class of its `Session`, which is loaded when a run begins."""
    plays_here: bool = True
    """The process of the trainer plays the episodes."""
    batches_behind: int = 0
    """Batches that samples may be behind the trained weights where max_lag is not given."""
    command: str = "train"
    """The command that resumes a run with it."""
    retries_a_divergence: bool = False
    """An update that diverged may succeed when the process is started again."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"engine = {self.engine!r}"

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return config.rollouts.engine == self.engine

    def samples_on_servers(self, config: RunConfig) -> bool:
        """True if servers sample: the weights are in another process, one copy of them."""
        return False

    def corrects_lag(self, config: RunConfig) -> bool:
        """True if old samples may be masked by default."""
        return True

    def filled(self, config: RunConfig, name: str, group_size: int) -> dict[str, Any]:
        """Defaults of its settings that depend on others, for a run of this name."""
        return {}

    def session_class(self) -> type[Session]:
        module, _, name = self.session.partition(":")
        found: type[Session] = getattr(importlib.import_module(module), name)
        return found


class Local(Engine):
    """The engine in the trainer's process, which shares its weights."""

    engine = "local"
    session = "ludic.run.session:EmbeddedSession"


LOCAL = Local()


def engine_names() -> tuple[str, ...]:
    """The values of the setting `engine`. A feature whose package is missing may be one: `engine_of` says what to install."""
    made = sorted(
        (each for each in plugin_features() if isinstance(each, Engine)), key=lambda each: not each.plays_here
    )
    return LOCAL.engine, *(each.engine for each in made), *(name for name, each in _found().items() if each is None)


def engine_of(config: RunConfig) -> Engine:
    """The engine that the settings name; MissingPlugin for one whose plug-in is not installed."""
    name = config.rollouts.engine
    if name == LOCAL.engine:
        return LOCAL
    if name not in engine_names():
        raise UnknownName.among("engine", name, engine_names())
    found: Engine = plugged(name, f"engine = {name!r}")
    return found
