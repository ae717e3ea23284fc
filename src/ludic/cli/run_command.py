"""What commands have in common: the extras they need; and for `ludic train`, `ludic actor` and `ludic launch` a TARGET, and the
settings of a run."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Protocol, TypeAlias, TypeVar

import tyro

from ludic.run.config import RunConfig
from ludic.run.settings import parse_flags, read_toml
from ludic.types import ConfigError, MissingExtra

Target: TypeAlias = Annotated[str, tyro.conf.arg(metavar="TARGET", help_behavior_hint=""), tyro.conf.Positional]

MODULES_OF = {
    "train": ("torch", "transformers", "jinja2", "safetensors"),
    "local": ("torch", "transformers", "jinja2"),
    "serve": ("torch", "transformers", "jinja2", "aiohttp"),
    "pipeline": ("redis",),
}
"""Extra -> what a command that needs it cannot be imported without."""


def need_extras(extras: str, needed_for: str) -> None:
    """Name those of the extras (with commas) that are missing, before a command imports what would fail without them."""
    missing = [extra for extra in extras.split(",") if not all(map(_is_installed, MODULES_OF[extra]))]
    if missing:
        raise MissingExtra(",".join(missing), needed_for)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is loaded, by other means than a file
        return True


class HasTarget(Protocol):
    """The words of a command that is about a run."""

    @property
    def target(self) -> str: ...


W = TypeVar("W", bound=HasTarget)


def read_run_command(words: type[W], args: list[str], *, prog: str, description: str) -> tuple[W, RunConfig]:
    """What was typed, over what is in the file that the target names, over the defaults."""
    typed = parse_flags(words, RunConfig(), args, prog=prog, description=description)
    path = config_file(typed.words.target)
    if path is None:
        return typed.words, replace(typed.config, env=replace(typed.config.env, id=typed.words.target))
    typed = parse_flags(words, read_toml(RunConfig, path), args, prog=prog, description=description)
    if not typed.config.env.id:
        raise ConfigError(f'{path} names no env; write id = "…" under [env].')
    return typed.words, typed.config


def config_file(target: str) -> Path | None:
    """The TOML file that a target means: itself, or that of a run folder; None for an env."""
    path = Path(target)
    if path.suffix == ".toml":
        return path
    return path / "config.toml" if path.is_dir() and (path / "config.toml").is_file() else None


def as_pipeline(config: RunConfig) -> RunConfig:
    """For commands that have no other engine."""
    return replace(config, rollouts=replace(config.rollouts, engine="pipeline"))
