"""Names for things, Gym-style: register, make, list, spec.

One registry per kind of part. Ids are `name` for what Ludic ships and `namespace/name` for everybody else's;
`ludic/name` is the long form of a built-in id. An installed package adds its parts through entry points of
the groups `ludic.envs`, `ludic.agents`, `ludic.contexts`, `ludic.protocols`, `ludic.parsers`, `ludic.tools`
and `ludic.algorithms`; their ids are `<distribution>/<entry point name>`.

    from ludic import registry
    env = registry.envs.make("tic_tac_toe", agent_starts=False)

    @registry.envs.register("mine/sum")
    class Sum(SingleAgentEnv): ...
"""

import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from ludic.catalog import BUILTINS, Suggested
from ludic.types.errors import ConfigError, UnknownName

_ID = re.compile(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)?")
_HOME = "ludic/"


@dataclass(frozen=True, kw_only=True, slots=True)
class EntrySpec:
    """What is known about one registered part without making it."""

    id: str
    kind: str
    target: str | Callable[..., Any]
    """The factory, or "module:attribute" to be imported when it is first made."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments given at registration; those given to `make` win."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for a small instance, for parts that cannot be made without any."""
    bind: bool = False
    """The target is the part itself, not a factory of it."""
    suggested: Suggested = field(default_factory=Suggested)
    """For envs: how they are best played."""

    def load(self) -> Callable[..., Any]:
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # somebody else's module may raise anything when it is imported
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
        self._entries = {
            name: EntrySpec(id=name, kind=kind, target=b.target, example=b.example, bind=b.bind, suggested=b.suggested)
            for name, b in BUILTINS[kind].items()
        }
        self._plugins_loaded = False

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
        """Add a part; without a target, a decorator that adds what it decorates."""
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
        key = id.removeprefix(_HOME)
        if key not in self._entries:
            self._load_plugins()
        if key not in self._entries:
            raise UnknownName.among(self.kind, id, self._entries)
        return self._entries[key]

    def make(self, id: str, **kwargs: Any) -> Any:
        """The part with that id; keyword arguments go to its factory."""
        spec = self.spec(id)
        factory = spec.load()
        merged = {**spec.kwargs, **kwargs}
        _check_arguments(spec, factory, merged)
        if spec.bind:
            return partial(factory, **merged) if merged else factory
        return factory(**merged)

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id.removeprefix(_HOME) in self.list()

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for point in entry_points(group=f"ludic.{self.kind}s"):
            owner = point.dist.name if point.dist is not None else "plugin"
            key = f"{owner}/{point.name}"
            if key not in self._entries:
                # A plugin's parser or tool is the callable itself; everything else is a class or factory.
                bind = self.kind in ("parser", "tool")
                self._entries[key] = EntrySpec(id=key, kind=self.kind, target=point.value, bind=bind)


def _check_arguments(spec: EntrySpec, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Name the wrong or missing argument and the ones there are, instead of a bare TypeError from deep inside."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature to check against
    try:
        if spec.bind:
            signature.bind_partial(**kwargs)
        else:
            signature.bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(str(p) for p in signature.parameters.values()) or "no arguments"
        raise ConfigError(
            f"The {spec.kind} {spec.id!r} cannot be made like that: {error}. It takes: {takes}."
        ) from error


envs = Registry("env")
agents = Registry("agent")
contexts = Registry("context")
protocols = Registry("protocol")
parsers = Registry("parser")
tools = Registry("tool")
algorithms = Registry("algorithm")

_BY_KIND = {r.kind: r for r in (envs, agents, contexts, protocols, parsers, tools, algorithms)}


def of(kind: str) -> Registry:
    """The registry of a kind: "env", "agent", "context", "protocol", "parser", "tool" or "algorithm"."""
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
