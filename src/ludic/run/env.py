"""Which env a run plays: a registered one, a class in a file, or one that was handed in."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ludic import registry
from ludic.catalog import Suggested
from ludic.envs.check import require_env
from ludic.interaction.base import AnyEnv
from ludic.types import ConfigError, Failure, LudicError, UnknownName


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvFactory:
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
        except (Exception, SystemExit) as error:  # the env's own code may raise anything
            given = ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items())
            failure = Failure.from_exception(error)
            hint = ". Give arguments with --set NAME=VALUE." if isinstance(error, TypeError) and not arguments else ""
            raise ConfigError(
                f"The env {self.id!r} cannot be made with {given or 'no arguments'}: {failure.summary}{hint}"
                + (f"\n{failure.user_traceback}" if failure.user_traceback else "")
            ) from error
        return require_env(made, self.id)


def env_factory(env: str | Callable[..., AnyEnv]) -> EnvFactory:
    """A registered env, `module:Class` or `file.py:Class`; or an env class, or a function that makes one."""
    if not isinstance(env, str):
        return EnvFactory(id=name_of(env), factory=env, takes_sample="sample" in inspect.signature(env).parameters)
    id = env
    spec = registry.envs.spec(id) if ":" in id else _registered(id)
    found = spec.load()
    return EnvFactory(
        id=id,
        factory=found if ":" in id else partial(registry.envs.make, id),
        takes_sample="sample" in inspect.signature(found).parameters,
        example=dict(spec.example),
        suggested=spec.suggested,
    )


def name_of(part: Any) -> str:
    """`module:name` of a part that was handed in as an object; `file.py:name` if it is of the script that runs."""
    named = part if hasattr(part, "__qualname__") else type(part)
    module, file = named.__module__, getattr(sys.modules.get(named.__module__), "__file__", None)
    where = os.path.relpath(file) if module == "__main__" and file is not None else module
    return f"{where}:{named.__qualname__}".replace("<", "").replace(">", "")


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
