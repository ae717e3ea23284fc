"""The subset of a Dockerfile that needs no image: WORKDIR, COPY of files of the build context, ENV and ARG.

`read_dockerfile` returns where commands start, the variables and the files of a workspace, and names every line that needs a
container (RUN, COPY --from, USER …). FROM is not followed: the workspace has the programs of the host.
"""

import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ludic.types import ConfigError
from ludic.util.files import parse_json

WORKDIR = "/app"
"""The default working folder."""
_IGNORED = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "VOLUME"}
"""Lines about how a container is started or described; commands run without them."""
SYSTEM_FOLDERS = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr"}
"""Folders of the host, or of no file system; a workspace cannot change them."""
_VARIABLE = re.compile(r"\\\$|\$(?:\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\}|(?P<plain>\w+))")
_ARCHIVE = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a task asks for and a workspace may not have."""

    name: str
    """Short, for `ignore`: RUN, network, USER …"""
    where: str
    """The line or setting that asks for it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"


@dataclass(kw_only=True, slots=True)
class Setup:
    """The content of a workspace that a Dockerfile describes."""

    workdir: str = WORKDIR
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Absolute path → content."""
    folders: set[str] = field(default_factory=set)
    """Absolute paths of folders that WORKDIR makes."""
    needs: list[Need] = field(default_factory=list)

    @property
    def top_folders(self) -> list[str]:
        """The folders below / that hold files or commands' working folders."""
        paths = [self.workdir, *self.files, *self.folders]
        return sorted({f"/{path.split('/')[1]}" for path in paths if path != "/"})


def read_dockerfile(text: str, context: Mapping[str, bytes]) -> Setup:
    """`context` has the files next to the Dockerfile, by relative path."""
    setup, known = Setup(), dict[str, str]()
    has_stage = False
    for number, line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        instruction, rest = word.upper(), rest.strip()
        where = f"Dockerfile line {number}: {line:.60}"
        match instruction:
            case "FROM":
                if has_stage:
                    setup.needs.append(Need("FROM", f"a second stage, {where}"))
                has_stage = True
            case "WORKDIR":
                given = _filled(rest.strip("\"'"), known)
                setup.workdir = posixpath.normpath(posixpath.join(setup.workdir if setup.folders else "/", given))
                setup.folders.add(setup.workdir)
                _check_place(setup, setup.workdir, where)
            case "ENV":
                for name, value in _assignments(rest, where):
                    setup.env[name] = known[name] = _filled(value, known)
            case "ARG":
                name, _, value = rest.partition("=")
                known.setdefault(name, _filled(value.strip("\"'"), known))
            case "COPY" | "ADD":
                _copy(setup, rest, context, known, where, is_add=instruction == "ADD")
            case "USER" if rest in ("root", "0"):
                pass
            case _ if instruction not in _IGNORED:
                setup.needs.append(Need(instruction, where))
    return setup


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Number and text of each instruction: lines that end in a backslash are joined, and heredocs belong to their line."""
    found: list[tuple[int, str]] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, raw in lines:
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\"):
            following = next((part.strip() for _, part in lines if not part.strip().startswith("#")), "")
            line = f"{line[:-1].rstrip()} {following}"
        for marker in re.findall(r"<<-?\s*[\"']?(\w+)[\"']?", line):
            for _, part in lines:
                if part.strip() == marker:
                    break
        found.append((number, line))
    return found


def _filled(text: str, known: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["plain"]
        return "$" if name is None else known.get(name) or found["default"] or ""

    return _VARIABLE.sub(value, text)


def _assignments(rest: str, where: str) -> list[tuple[str, str]]:
    first, _, value = rest.partition(" ")
    if "=" not in first:  # the old form: ENV NAME the whole rest
        return [(first, value.strip())]
    try:
        pairs = [word.partition("=") for word in shlex.split(rest)]
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from error
    return [(name, value) for name, _, value in pairs]


def _check_place(setup: Setup, path: str, where: str) -> None:
    if path != "/" and path.split("/")[1] in SYSTEM_FOLDERS:
        setup.needs.append(Need(f"/{path.split('/')[1]}", where))


def _copy(
    setup: Setup, rest: str, context: Mapping[str, bytes], known: Mapping[str, str], where: str, *, is_add: bool
) -> None:
    name = "ADD" if is_add else "COPY"
    try:
        words = parse_json(rest[rest.index("[") :]) if "[" in rest and rest.endswith("]") else shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} cannot be read: {error}.") from error
    flags = [word for word in words if word.startswith("--")]
    paths = [_filled(word, known) for word in words if not word.startswith("--")]
    remote = is_add and any("://" in path or path.endswith(_ARCHIVE) for path in paths[:-1])
    if remote or "<<" in rest or any(flag.partition("=")[0] in ("--from", "--exclude") for flag in flags):
        setup.needs.append(Need(name, where))
        return
    if len(paths) < 2:
        raise ConfigError(f"{where}: {name} has a source and a target.")
    *sources, given = paths
    base = setup.workdir if setup.folders else "/"
    target = posixpath.normpath(posixpath.join(base, given))
    _check_place(setup, target, where)
    into_folder = given.endswith("/") or given in (".", "..") or len(sources) > 1 or target in setup.folders
    for source in sources:
        found = _matching(posixpath.normpath(source.lstrip("/") or "."), context)
        if not found:
            raise ConfigError(f"{where}: the build context has no {source!r}; it has {', '.join(sorted(context)[:8])}.")
        is_one_file = len(found) == 1 and not found[0][1]
        for path, below in found:
            tail = below or (posixpath.basename(path) if into_folder or not is_one_file else "")
            setup.files[posixpath.normpath(posixpath.join(target, tail))] = context[path]


def _matching(pattern: str, context: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Files of the context that a source names, each with its path below the named folder (empty for a file itself)."""
    found = []
    for path in sorted(context):
        parts = path.split("/")
        if pattern == ".":
            found.append((path, path))
            continue
        depth = pattern.count("/") + 1
        if depth <= len(parts) and fnmatchcase("/".join(parts[:depth]), pattern):
            found.append((path, "/".join(parts[depth:])))
    return found
