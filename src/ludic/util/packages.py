"""The packages of Ludic's extras that are installed, and the pip command that installs the others. Standard library only."""

import functools
import importlib.metadata
import importlib.util
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ludic.util.errors import DISTRIBUTION

_CHECKOUT = Path(__file__).parents[3]


@functools.cache
def requirements() -> dict[str, tuple[str, ...]]:
    """Extra -> its requirements, such as torch>=2.8; "" is the base install. From the clone that runs, else from what pip wrote."""
    project = _project()
    if project is not None:
        return {
            "": tuple(project["dependencies"]),
            **{k: tuple(v) for k, v in project["optional-dependencies"].items()},
        }
    found: dict[str, list[str]] = {"": []}
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        found.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return {extra: tuple(lines) for extra, lines in found.items()}


def _project() -> dict[str, Any] | None:
    file = _CHECKOUT / "pyproject.toml"
    if not file.is_file():
        return None
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == DISTRIBUTION else None


def version_of(package: str) -> str:
    """The installed version; empty if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def problems(extras: Iterable[str]) -> list[str]:
    """Requirements of the extras that this Python lacks: `not installed: torch`, `numpy is 1.2, but needed is 1.26 or later`."""
    absent, old = [], []
    for requirement in dict.fromkeys(line for extra in extras for line in requirements().get(extra, ())):
        name = re.split(r"[\[<>=!~ ]", requirement)[0]
        if name == DISTRIBUTION:
            continue
        least, version = re.search(r">=([\w.]+)", requirement), version_of(name)
        if not version:
            absent.append(name)
        elif least and _numbers(version) < _numbers(least[1]):
            old.append(f"{name} is {version}, but needed is {least[1]} or later")
    return [f"not installed: {', '.join(absent)}", *old] if absent else old


def _numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cpu as (2, 11, 0), filled up with zeros so that 5 is not below 5.0."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[+]|a|b|rc|\.dev|\.post", version)[0])]
    return tuple([*numbers, 0, 0, 0, 0][:4])


def install(extras: Iterable[str]) -> str:
    """The pip command that installs extras into this Python, as Ludic itself was installed."""
    names = ",".join(extras)
    wanted = f"[{names}]" if names else ""
    if _project() is not None:
        place = f".{wanted}" if Path.cwd() == _CHECKOUT else f"{_CHECKOUT}{wanted}"
        return f"{pip_install()} -e {shlex.quote(place)}"
    origin = _origin()
    url = origin.get("url", "<repository URL>")
    vcs = "" if "dir_info" in origin or "archive_info" in origin else origin.get("vcs_info", {}).get("vcs", "git") + "+"
    return f"{pip_install()} '{DISTRIBUTION}{wanted} @ {vcs}{url}'"


def _origin() -> dict[str, Any]:
    """Source from which pip installed Ludic, by the file direct_url.json."""
    try:
        found: dict[str, Any] = json.loads(
            importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
        )
    except importlib.metadata.PackageNotFoundError:
        return {}
    return found


def pip_install() -> str:
    """The command that installs a package into this Python: pip's, or uv's where an environment has no pip."""
    found, python = shutil.which("pip"), shlex.quote(sys.executable)
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip install"
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"
