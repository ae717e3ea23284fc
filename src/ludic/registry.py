"""Registries of named parts, as in Gymnasium: register, make, list, spec.

One registry per kind of part. Built-in ids are `name` (long form `ludic/name`), all others `namespace/name`. An installed package
adds its parts through entry points of the groups `ludic.envs`, `ludic.agents`, `ludic.contexts`, `ludic.protocols`,
`ludic.parsers`, `ludic.tools`, `ludic.rewards`, `ludic.filters`, `ludic.curriculums`, `ludic.loggers` and `ludic.algorithms`; their
ids are `<distribution>/<entry point name>`. Your own part needs no registration: every id may also be `path/to/file.py:name` or
`module:name`.

    from ludic import registry
    env = registry.envs.make("tic_tac_toe", agent_starts=False)

    @registry.envs.register("mine/sum")
    class Sum(SingleAgentEnv): ...
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ludic import plugins
from ludic.catalog import BUILTINS, PACKAGES, Entry, Suggested
from ludic.types.errors import (
    DISTRIBUTION,
    ConfigError,
    LudicError,
    MissingExtra,
    UnknownName,
    how_to_install_package,
    is_users_file,
)
from ludic.util.lazy import is_plugin, missing

_ID = re.compile(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)?")
_HOME = "ludic/"
_OWN_PREFIX = "own_file_"
"""Prefix of module names loaded from `file.py:name`."""
_GIVEN_AS_FUNCTIONS = ("parser", "tool", "reward", "filter")
"""Kinds whose part is a function itself, and not what a function returns."""
_ARGUMENTS = {kind: f"{kind}_set" for kind in ("agent", "context", "protocol", "parser", "reward", "curriculum")}
_ARGUMENTS |= {"env": "set", "algorithm": "algo_set"}
"""Kind -> the setting that holds arguments of its parts."""
_MOVED = {"harbor_family": "examples/harbor_tasks/family.py:HarborFamilyEnv"}
"""Id of 0.2.0 -> the id of the same part in a clone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntrySpec(Entry):
    """One registered part."""

    id: str
    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments given at registration; those given to `make` win."""

    def load(self) -> Callable[..., Any]:
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a plugin's module may raise anything when it is imported
            _name_extra(error, f"The {self.kind} {self.id!r}")
            raise ConfigError(
                f"The {self.kind} {self.id!r} is registered as {self.target!r}, which cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
        return found

    @property
    def summary(self) -> str:
        """First line of the target's docstring."""
        return (inspect.getdoc(self.load()) or "").split("\n")[0]


class Registry:
    """All parts of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries = {name: _spec_of(entry, name, kind) for name, entry in BUILTINS[kind].items()}
        self._packages = PACKAGES.get(kind, {})
        self._plugins_loaded = False
        self._unread: set[str] = set()
        """Ids of entry points that have not been imported: what they name may be an Entry."""
        self._checked: dict[tuple[str, tuple[str, ...]], Callable[..., Any]] = {}
        """Id and argument names -> the factory that takes them: checking a call costs more than making most parts."""

    def register(
        self,
        id: str,
        target: str | Callable[..., Any] | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        example: Mapping[str, Any] | None = None,
        bind: bool = False,
        suggested: Suggested | None = None,
        replace: bool = False,
    ) -> Any:
        """Register a part; without a target, returns a decorator that registers its argument."""
        if target is None:

            def decorate(decorated: Any) -> Any:
                self.register(
                    id, decorated, kwargs=kwargs, example=example, bind=bind, suggested=suggested, replace=replace
                )
                return decorated

            return decorate
        if not _ID.fullmatch(id):
            raise ConfigError(
                f"{id!r} is not a valid {self.kind} id; use name or namespace/name (letters, digits, _ . -)."
            )
        key = id.removeprefix(_HOME)
        if key in self._entries and not replace:
            raise ConfigError(
                f"The {self.kind} {id!r} is registered already ({self._entries[key].target!r}). "
                "Choose another id or namespace, or pass replace=True."
            )
        spec = EntrySpec(
            id=key,
            kind=self.kind,
            target=target,
            kwargs=kwargs or {},
            example=example or {},
            bind=bind,
            suggested=suggested or Suggested(),
        )
        self._entries[key] = spec
        return spec

    def unregister(self, id: str) -> None:
        self.spec(id)
        del self._entries[id.removeprefix(_HOME)]

    def list(self) -> builtins.list[str]:
        """Every known id, sorted."""
        self._load_plugins()
        return sorted(self._entries)

    def spec(self, id: str) -> EntrySpec:
        """The spec of a registered part, or of a `file.py:name` or `module:name`, which is loaded."""
        part, _, arguments = id.partition(":")
        if "=" in arguments and self.kind in _ARGUMENTS and part in self:
            name = _ARGUMENTS[self.kind]
            raise ConfigError(
                f"{id!r:.100}: arguments of the {self.kind} {part!r} are given apart, with --{name.replace('_', '-')} "
                f"{arguments:.80} (in a file or `build`: {name})."
            )
        if ":" in id:
            found = load_own(id, self.kind)
            is_part = self.kind in _GIVEN_AS_FUNCTIONS and not inspect.isclass(found)
            return EntrySpec(id=id, kind=self.kind, target=found, bind=is_part)
        key = id.removeprefix(_HOME)
        if key not in self._entries:
            self._load_plugins()
        if key not in self._entries and key in self._packages:
            package = self._packages[key]
            raise UnknownName(
                f"The {self.kind} {id!r} is in the package {package}, which is not installed. {how_to_install_package(package)}"
            )
        if key not in self._entries and key in _MOVED:
            raise UnknownName(f"The {self.kind} {id!r} is now {_MOVED[key]}, in a clone of Ludic; give that instead.")
        if key not in self._entries:
            raise UnknownName.among(self.kind, id, self._entries)
        if key in self._unread:
            named: Any = self._entries[key].load()
            if isinstance(named, Entry):
                self._entries[key] = _spec_of(named, key, self.kind)
            self._unread.discard(key)  # another thread may have read it
        return self._entries[key]

    def make(self, id: str, **kwargs: Any) -> Any:
        """Make the part with this id; keyword arguments go to its factory."""
        spec = self.spec(id)
        factory = spec.load()
        merged = {**spec.kwargs, **kwargs}
        call = (id, tuple(merged))
        if self._checked.get(call) is not factory:
            _check_arguments(spec, factory, merged)
            self._checked[call] = factory
        if spec.bind:
            return partial(factory, **merged) if merged else factory
        try:
            return factory(**merged)
        except Exception as error:
            if ":" not in id or isinstance(error, LudicError):
                raise
            raise ConfigError(f"Cannot make the {self.kind} {id!r}: {_where_raised(error)}.") from error

    def __contains__(self, id: object) -> bool:
        self._load_plugins()
        return isinstance(id, str) and id.removeprefix(_HOME) in self._entries

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        for point in plugins.points(f"{self.kind}s"):
            owner = point.distribution
            is_ours = owner in (DISTRIBUTION, self._packages.get(point.name))
            key = point.name if is_ours else f"{owner}/{point.name}"
            if key not in self._entries:
                bind = self.kind in _GIVEN_AS_FUNCTIONS
                self._unread.add(key)
                self._entries[key] = EntrySpec(id=key, kind=self.kind, target=point.target, bind=bind)
        self._plugins_loaded = True  # at the end: another thread may look a name up meanwhile


def _spec_of(entry: Entry, id: str, kind: str) -> EntrySpec:
    return EntrySpec(
        id=id, kind=kind, target=entry.target, example=entry.example, bind=entry.bind, suggested=entry.suggested
    )


def _check_arguments(spec: EntrySpec, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError that names the wrong or missing argument and the accepted ones."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature
    try:
        (signature.bind_partial if spec.bind else signature.bind)(**kwargs)
    except TypeError as error:
        takes = ", ".join(str(p) for p in signature.parameters.values()) or "no arguments"
        raise ConfigError(
            f"The {spec.kind} {spec.id!r} cannot be made like that: {error}. It takes: {takes}."
        ) from error


# --- user's parts: file.py:name and module:name ---

_LOADING: dict[str, threading.RLock] = {}
"""Module name of a file -> held while the file is executed: another thread must not find it half executed. One lock for all would
be held while a file imports, and another thread may hold Python's lock of that import and load a file."""


def load_own(id: str, kind: str) -> Callable[..., Any]:
    """The class or function of `file.py:name` or `module:name`; messages call it a `kind`."""
    place, _, name = id.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else _load_module(place)
    found: Any = getattr(module, name, None)
    if found is None:
        inside = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise UnknownName.among(f"{kind} in {place}", name, inside)
    if not callable(found):
        raise ConfigError(f"{id} is {found!r:.60}; for the {kind}, name a class or a function.")
    return found


def _load_module(name: str) -> ModuleType:
    try:
        with _importing_from(Path.cwd()):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        _name_extra(error, f"The module {name}")
        raise ConfigError(f"Cannot load the module {name}: {_where_raised(error)}.") from error


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise ConfigError(f"There is no file {place} in {Path.cwd()}. Write path/to/file.py:name.")
    # A unique name: a file called math.py must not shadow the standard library or a file of another folder.
    name = f"{_OWN_PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    with _LOADING.setdefault(name, threading.RLock()):
        return sys.modules.get(name) or _execute(path, name, place)


def _execute(path: Path, name: str, place: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling looks classes up there
    try:
        with _importing_from(path.parent):
            _check_neighbours(path)
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, ConfigError):
            raise
        _name_extra(error, place)
        raise ConfigError(f"Cannot load {place}: {_where_raised(error)}.") from error
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let `import helper` find helper.py of this folder, as under `python file.py`. The standard library has precedence, and after
    loading so have installed packages: transformers must not import a datasets.py of this folder."""
    entry = str(folder)
    installed = (i for i, p in enumerate(sys.path) if Path(p).name in ("site-packages", "dist-packages"))
    place = next(installed, len(sys.path))
    sys.path.insert(place, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may have changed the path itself
            sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)  # for imports inside functions


def _check_neighbours(path: Path) -> None:
    """Raise ConfigError if the file would import another folder's module instead of the one in its folder: Python has one module
    per name."""
    for name in _imported_names(path) - sys.stdlib_module_names:
        beside = [p for p in (path.with_name(f"{name}.py"), path.parent / name / "__init__.py") if p.is_file()]
        found = importlib.util.find_spec(name) if beside else None
        if found and found.origin and Path(found.origin).resolve() != beside[0].resolve():
            raise ConfigError(
                f"{path} imports {name!r}, which is {beside[0]}, but {found.origin} has that name already. Rename one of the two."
            )


def _imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):  # executing the file reports them
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).partition(".")[0])
    return names


def _name_extra(error: BaseException, needed_for: str) -> None:
    """Raise MissingExtra if the import of PyTorch, transformers or a plug-in failed."""
    if isinstance(error, ModuleNotFoundError) and is_plugin(error.name):
        raise missing(str(error.name), needed_for) from error
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers", "safetensors"):
        raise MissingExtra("train", needed_for) from error


def _where_raised(error: BaseException) -> str:
    """The innermost line in the user's files, and the error."""
    if isinstance(error, SyntaxError) and error.filename:
        place, number, line, what = error.filename, error.lineno, error.text or "", error.msg
    else:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
        place, number, line = (own[-1].filename, own[-1].lineno, own[-1].line or "") if own else ("", None, "")
        what = str(error)
    raised = f"{type(error).__name__}: {what}".rstrip(".")
    return f"{place}, line {number}, `{line.strip()}`, raised {raised}" if place else raised


def name_of(part: Any) -> str:
    """`module:name` of a part that was given as an object; `file.py:name` if it belongs to the running script, or was loaded as
    that."""
    named = part if hasattr(part, "__qualname__") else type(part)
    module, file = named.__module__, getattr(sys.modules.get(named.__module__), "__file__", None)
    is_file = module == "__main__" or module.startswith(_OWN_PREFIX)
    where = os.path.relpath(file) if is_file and file is not None else module
    return f"{where}:{named.__qualname__}".replace("<", "").replace(">", "")


# --- one registry per kind ---

envs = Registry("env")
agents = Registry("agent")
contexts = Registry("context")
protocols = Registry("protocol")
parsers = Registry("parser")
tools = Registry("tool")
rewards = Registry("reward")
filters = Registry("filter")
curricula = Registry("curriculum")
loggers = Registry("logger")
algorithms = Registry("algorithm")

_BY_KIND = {
    r.kind: r
    for r in (envs, agents, contexts, protocols, parsers, tools, rewards, filters, curricula, loggers, algorithms)
}


def of(kind: str) -> Registry:
    """The registry of a kind: env, agent, context, protocol, parser, tool, reward, filter, curriculum, logger or algorithm."""
    if kind not in _BY_KIND:
        raise UnknownName.among("kind of part", kind, _BY_KIND)
    return _BY_KIND[kind]


def register(kind: str, id: str, target: str | Callable[..., Any], **settings: Any) -> EntrySpec:
    return of(kind).register(id, target, **settings)


def make(kind: str, id: str, **kwargs: Any) -> Any:
    return of(kind).make(id, **kwargs)


def spec(kind: str, id: str) -> EntrySpec:
    return of(kind).spec(id)


def list(kind: str) -> builtins.list[str]:
    return of(kind).list()
