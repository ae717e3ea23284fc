"""Names and objects that a run is given: its env, its samples, and parts in the place of settings."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.catalog import Suggested
from ludic.envs.check import require_env
from ludic.interaction.base import AnyEnv
from ludic.run.features.base import plugged
from ludic.types import (
    BatchSource,
    ConfigError,
    Failure,
    LudicError,
    Reducer,
    Scorer,
    TrainingLogger,
    UnknownName,
)

if TYPE_CHECKING:
    from ludic.agents import Agent
    from ludic.interaction import InteractionProtocol
    from ludic.models.loading import LoadedModel
    from ludic.parsers import Parser
    from ludic.run.session import Session
    from ludic.training import RLAlgorithm


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


def env_factory(env: str | Callable[..., AnyEnv], *, server: str | None = None) -> EnvFactory:
    """A registered env, `module:Class` or `file.py:Class`; or an env class, or a function that makes one. With `server`, an env
    that this env server has; it need not be installed here."""
    if server is not None:
        id = env if isinstance(env, str) else registry.name_of(env)
        served: EnvFactory = plugged("env_workers", f"env_server = {server!r}").served(id, server)
        return served
    if not isinstance(env, str):
        return EnvFactory(
            id=registry.name_of(env), factory=env, takes_sample="sample" in inspect.signature(env).parameters
        )
    spec = registry.envs.spec(env) if ":" in env else _registered(env)
    found = spec.load()
    return EnvFactory(
        id=env,
        factory=found if ":" in env else partial(registry.envs.make, env),
        takes_sample="sample" in inspect.signature(found).parameters,
        example=dict(spec.example),
        suggested=spec.suggested,
    )


def no_env() -> EnvFactory:
    """The env of a run that learns from stored preferences and plays nothing."""

    def refuse() -> AnyEnv:
        raise ConfigError("This run names no env, so there is nothing to play. Give one as TARGET.")

    return EnvFactory(id="", factory=refuse, takes_sample=False)


def _registered(id: str) -> registry.EntrySpec:
    """The entry of a registered env; a path of a file or folder gets an error that says so."""
    try:
        return registry.envs.spec(id)
    except UnknownName:
        path = Path(id)
        if path.suffix != ".py" and (path.parent == Path() or not path.parent.is_dir()):
            raise
        there = ", ".join(sorted(file.parent.name for file in path.parent.glob("*/config.toml"))) or "none"
        runs = f"There is no run in {id}, nor an env of that name. Runs in {path.parent}: {there}."
        is_file = f"{id} is a file; which env in it? Write {id}:Class."
        raise ConfigError(is_file if path.suffix == ".py" else runs) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Objects that were given to `build` instead of names. None, or empty: the name in the settings decides."""

    agent: "Callable[..., Agent] | None" = None
    """Called with client, model, ctx, parser, chat_template and the arguments of the settings for every episode."""
    context: Callable[..., Any] | None = None
    parser: "Parser | None" = None
    tools: Sequence[Any] = ()
    algorithm: "RLAlgorithm | None" = None
    loss: Any = None
    """Replaces the algorithm's."""
    model: "LoadedModel | None" = None
    samples: Sequence[Any] | Callable[..., Any] | None = None
    """For envs that ask about samples: instead of a file. A function generates them (docs/task-streams.md)."""
    eval_samples: Sequence[Any] | Callable[..., Any] | None = None
    loggers: Sequence[TrainingLogger] = ()
    """In addition to those of the settings."""
    reward: Callable[[Any, str, Any], Any] | None = None
    """For an agent that is a function or a command: (task, answer, session) -> reward, instead of the env's. Not for engine =
    pipeline."""
    scorers: "Sequence[Scorer | Callable[..., Any]]" = ()
    """Scorers and reward functions in addition to those of the settings. Not for engine = pipeline."""
    policies: Mapping[str, Any] = field(default_factory=dict)
    """For such an agent: further models by the names that it asks for. Not for engine = pipeline."""
    protocol: "Callable[..., InteractionProtocol] | None" = None
    """Called with client, model and chat_template for every episode; replaces agent, context, parser and tools."""
    source: Callable[[BatchSource], BatchSource] | None = None
    """Wraps the source of fresh rollouts, e.g. by a replay buffer. Not for engine = pipeline."""
    session: "type[Session] | None" = None
    """Makes the batches instead of the engine of the settings."""
    reducers: Mapping[str, Reducer] = field(default_factory=dict)
    """Training metrics in addition to the usual ones."""
    command: str = ""
    """The command line of a script that trains this run, for messages that say how to resume it."""


def has_task(env: EnvFactory, arguments: Mapping[str, Any]) -> bool:
    """True if the arguments say what is asked: the sample, or what the env's example has instead, such as a folder of tasks."""
    return not arguments.keys().isdisjoint({"sample", *env.example})


def check_data(found: EnvFactory, data: Path | None, arguments: Mapping[str, Any], flag: str) -> None:
    """ConfigError unless a file of samples is given exactly where the env asks about samples."""
    if data is None and found.takes_sample and not has_task(found, arguments):
        raise ConfigError(
            f"The env {found.id!r} asks about samples; give {flag} FILE.jsonl with one JSON object per line"
            + (f" such as {dict(found.example)['sample']!r:.200}" if "sample" in found.example else "")
            + f", {flag} hub:NAME:SPLIT, or {flag} file.py:function, which generates them"
            + "".join(f", or --set {name}=…" for name in found.example if name != "sample")
            + "."
        )
    if data is not None and not found.takes_sample:
        raise ConfigError(f"{flag} {data} was given, but the env {found.id!r} has no argument `sample` to take it.")
