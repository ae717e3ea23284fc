"""Which env a command plays: a registered one, or a class of your own in a file; and the samples it asks about."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
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
    if ":" not in id:
        spec = registry.envs.spec(id)
        return FoundEnv(
            id=id,
            factory=partial(registry.envs.make, id),
            takes_sample=_takes_sample(spec.load()),
            example=dict(spec.example),
            suggested=spec.suggested,
        )
    place, _, name = id.rpartition(":")
    try:
        found: Callable[..., AnyEnv] = getattr(_module(place), name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"Cannot load the env {id!r}: {error}. Write module:Class or path/to/file.py:Class."
        ) from error
    return FoundEnv(id=id, factory=found, takes_sample=_takes_sample(found))


def _takes_sample(factory: Callable[..., Any]) -> bool:
    return "sample" in inspect.signature(factory).parameters


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    # By path and under a name of its own: a file called math.py must not turn into the standard library's.
    spec = importlib.util.spec_from_file_location(f"ludic_user_{Path(place).stem}", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickling looks classes up there
    spec.loader.exec_module(module)
    return module
