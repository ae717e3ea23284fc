"""Plug-ins: what installed packages add to Ludic, found through their entry points.

Ludic's own plug-ins (plugins/ in the repository) and packages of others have the same door: groups `ludic.commands`, `ludic.envs`,
`ludic.agents` and so on. One scan reads all groups; its result is kept in the user's cache until a folder of packages changes,
so that `ludic --help` stays fast. Standard library only.
"""

import functools
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ludic.util.lazy import forward as forward
from ludic.util.lazy import lazy as lazy
from ludic.util.lazy import missing as missing

GROUPS = "ludic."
"""Prefix of the entry-point groups that Ludic reads."""


class Point(NamedTuple):
    """One entry point."""

    group: str
    name: str
    target: str
    """module:attribute, or a module"""
    distribution: str
    """Name of the package that declares it."""

    @property
    def package(self) -> str:
        return self.target.partition(":")[0].partition(".")[0]

    def load(self) -> Any:
        """The object that the entry point names; MissingPlugin if its package is gone."""
        module, _, attribute = self.target.partition(":")
        try:
            found = importlib.import_module(module)
            return getattr(found, attribute) if attribute else found
        except ModuleNotFoundError as error:
            if error.name != self.package:
                raise
            raise missing(self.package, f"{self.group.removeprefix(GROUPS)[:-1]} {self.name!r}") from error


def points(group: str) -> list[Point]:
    """All entry points of a group, such as `commands`, sorted by name."""
    return [point for point in _all_points() if point.group == GROUPS + group]


def find(group: str, name: str) -> Point | None:
    """The entry point of that name; Ludic's own wins."""
    from ludic.util.packages import DISTRIBUTION

    named = [point for point in points(group) if point.name == name]
    return min(named, key=lambda point: point.distribution != DISTRIBUTION, default=None)


def is_stale(group: str, name: str) -> bool:
    """True if the clone that runs declares an entry point that its installation, made earlier, does not know."""
    import tomllib

    file = Path(__file__).parents[2] / "pyproject.toml"
    if find(group, name) is not None or not file.is_file():
        return False
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return name in project.get("entry-points", {}).get(GROUPS + group, {})


STALE = "This clone is newer than its installation: run `pip install -e .` in it again."

# --- the scan --------------------------------------------------------------------------------------------------


@functools.cache
def _all_points() -> tuple[Point, ...]:
    key = _state_of_folders()
    cached = _cache_file()
    try:
        stored = json.loads(cached.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return tuple(Point(*each) for each in stored["points"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = _scan()
    _store(cached, {"key": key, "points": found})
    return found


def _scan() -> tuple[Point, ...]:
    from importlib.metadata import distributions

    found: dict[tuple[str, str, str], Point] = {}
    for distribution in distributions():
        points = distribution.entry_points
        for point in (each for each in points if each.group.startswith(GROUPS)):
            owner = distribution.metadata["Name"]
            found.setdefault((point.group, point.name, owner), Point(point.group, point.name, point.value, owner))
    return tuple(sorted(found.values()))


def _state_of_folders() -> str:
    """A text that changes when a package is installed or removed."""
    state = [sys.version]
    for folder in sys.path:
        try:
            state.append(f"{folder} {os.stat(folder).st_mtime_ns}")
        except OSError:
            state.append(folder)
    return hashlib.sha256("\n".join(state).encode()).hexdigest()


def _cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = hashlib.sha256("\n".join([sys.prefix, *sys.path]).encode()).hexdigest()[:16]
    return Path(root) / "ludic" / f"plugins-{place}.json"


def _store(file: Path, content: dict[str, Any]) -> None:
    """A folder that cannot be written costs time only."""
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(file)
    except OSError:
        pass
