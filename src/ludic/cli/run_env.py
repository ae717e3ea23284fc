"""Which env a command plays: a registered one, or a class of your own in a file; and the samples it asks about."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ludic import registry
from ludic.catalog import Suggested
from ludic.interaction.base import AnyEnv
from ludic.types import ConfigError, LudicError


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundEnv:
    """An env that can be made."""

    id: str
    factory: Callable[..., AnyEnv]
    takes_sample: bool
    """It asks about one sample of a dataset, its argument `sample`."""
    example: Mapping[str, Any] = field(default_factory=dict)
    suggested: Suggested = field(default_factory=Suggested)

    def make(self, arguments: Mapping[str, Any]) -> AnyEnv:
        try:
            return self.factory(**arguments)
        except (TypeError, ValueError, KeyError) as error:
            if isinstance(error, LudicError):
                raise
            given = ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items())
            raise ConfigError(f"The env {self.id!r} cannot be made with {given or 'no arguments'}: {error}") from error


def find_env(id: str) -> FoundEnv:
    """A registered env, or `module:Class` / `file.py:Class` of your own."""
    spec = registry.envs.spec(id)
    found = spec.load()
    return FoundEnv(
        id=id,
        factory=found if ":" in id else partial(registry.envs.make, id),
        takes_sample="sample" in inspect.signature(found).parameters,
        example=dict(spec.example),
        suggested=spec.suggested,
    )
