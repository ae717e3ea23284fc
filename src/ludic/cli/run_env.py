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
from ludic.envs.check import require_env
from ludic.interaction.base import AnyEnv
from ludic.types import ConfigError, Failure, LudicError, UnknownName


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
            made = self.factory(**arguments)
        except LudicError:
            raise
        except Exception as error:  # the env's own code may raise anything
            given = ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items())
            failure = Failure.from_exception(error)
            hint = ". Give arguments with --set NAME=VALUE." if isinstance(error, TypeError) and not arguments else ""
            raise ConfigError(
                f"The env {self.id!r} cannot be made with {given or 'no arguments'}: {failure.summary}{hint}"
                + (f"\n{failure.user_traceback}" if failure.user_traceback else "")
            ) from error
        return require_env(made, self.id)


def find_env(id: str) -> FoundEnv:
    """A registered env, or `module:Class` / `file.py:Class` of your own."""
    if ":" not in id:
        spec = _registered(id)
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
    if not callable(found):
        raise ConfigError(f"{id} is {found!r:.60}, and not a class or a function that makes an env.")
    return FoundEnv(id=id, factory=found, takes_sample=_takes_sample(found))


def _registered(id: str) -> registry.EntrySpec:
    """The entry of a registered env; what is plainly a file or a folder is answered as such."""
    try:
        return registry.envs.spec(id)
    except UnknownName:
        path = Path(id)
        if path.suffix == ".py":
            raise ConfigError(f"{id} is a file; which env in it? Write {id}:Class.") from None
        if path.parent != Path() and path.parent.is_dir():
            there = ", ".join(sorted(file.parent.name for file in path.parent.glob("*/config.toml"))) or "none"
            raise ConfigError(
                f"There is no run in {id}, nor an env of that name. Runs in {path.parent}: {there}."
            ) from None
        raise


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
