"""The features of plug-ins, found by the entry points `ludic.features`."""

import functools
from typing import Any

from ludic.plugins import STALE, find, is_stale, points
from ludic.run.features.base import Feature
from ludic.types import ConfigError
from ludic.types.errors import MissingPlugin

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
