"""From the names in a request to fresh objects: one env and one protocol per episode."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ludic import registry
from ludic.envs import LudicEnv
from ludic.interaction import InteractionProtocol
from ludic.interaction.base import AnyEnv
from ludic.types import ConfigError, RolloutRequest, UnknownName

Factory = Callable[..., Any]


class Factories:
    """Env and protocol factories by kind. Env kinds that are not given come from the registry."""

    def __init__(self, envs: Mapping[str, Factory] | None, protocols: Mapping[str, Factory] | None) -> None:
        self._envs = envs or {}
        self._protocols = protocols or {}
        self._checked: set[tuple[Factory, tuple[str, ...]]] = set()
        """Calls known to fit: checking each one again would cost more than making the object."""
        self._on_loop: dict[str, bool] = {}

    def check(self, request: RolloutRequest) -> None:
        """Unknown names are found before the first episode starts."""
        if request.env.kind not in self._envs and request.env.kind not in registry.envs:
            known = {*self._envs, *registry.envs.list()}
            raise UnknownName.among("env", request.env.kind, known, "Add it to env_registry, or register it.")
        if request.protocol.kind not in self._protocols:
            raise UnknownName.among(
                "protocol", request.protocol.kind, self._protocols, "Add a factory to protocol_registry."
            )

    def makes_env_on_loop(self, request: RolloutRequest) -> bool:
        """The kind is a class of envs that do not block. Any other factory may do anything, and is called in a thread."""
        kind = request.env.kind
        if kind not in self._on_loop:
            made_by = self._envs[kind] if kind in self._envs else registry.envs.spec(kind).load()
            self._on_loop[kind] = isinstance(made_by, type) and issubclass(made_by, LudicEnv) and not made_by.blocking
        return self._on_loop[kind]

    def make_env(self, request: RolloutRequest) -> AnyEnv:
        kind, kwargs = request.env.kind, request.env.kwargs
        if kind not in self._envs:
            made: AnyEnv = registry.envs.make(kind, **kwargs)
            return made
        env: AnyEnv = self._make("env", kind, self._envs[kind], kwargs)
        return env

    def make_protocol(self, request: RolloutRequest) -> InteractionProtocol:
        kind = request.protocol.kind
        protocol = self._make("protocol", kind, self._protocols[kind], request.protocol.kwargs)
        if not isinstance(protocol, InteractionProtocol):
            raise ConfigError(
                f"The factory of protocol {kind!r} returned {type(protocol).__name__}; it must make a new "
                "InteractionProtocol, for example SingleAgentProtocol(agent), each time it is called."
            )
        return protocol

    def _make(self, what: str, kind: str, factory: Factory, kwargs: Mapping[str, Any]) -> Any:
        call = (factory, tuple(kwargs))
        if call not in self._checked:
            _check_arguments(what, kind, factory, kwargs)
            self._checked.add(call)
        return factory(**kwargs)


def _check_arguments(what: str, kind: str, factory: Factory, kwargs: Mapping[str, Any]) -> None:
    """A wrong argument is a mistake in the set-up; without this it would be one failed episode after the other."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # some built-in callables have none to check against
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "no arguments"
        raise ConfigError(
            f"The {what} {kind!r} cannot be made from {sorted(kwargs)}: {error}. Its factory takes: {takes}."
        ) from error
