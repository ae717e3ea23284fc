"""`Run`: a training run as one object, and `build`, which makes it from settings, from names or from objects.

    run = ludic.run.build(env="gsm8k", data="questions.jsonl", model="smollm2-135m", algo="grpo", lora_rank=16)
    run.train(steps=100)

The command `ludic train` is the same with flags. Nothing is loaded before the first `train`, `resume` or `evaluate`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ludic import registry
from ludic.batch_gen import TooManyFailures
from ludic.distributed import WeightPushError
from ludic.eval import EvalReport
from ludic.models.loading import LoadedModel
from ludic.run.checks import stored_problems
from ludic.run.config.entries import PolicyEntry
from ludic.run.config.run_config import RunConfig
from ludic.run.dry_run import plan_lines
from ludic.run.features.base import engine_of
from ludic.run.folder import (
    ResumePoint,
    failure_written,
    how_to_resume,
    latest_checkpoint,
    prepare_folder,
    resume_point,
    saved_step,
    write_config,
)
from ludic.run.given import EnvFactory, Parts, env_factory, no_env
from ludic.run.model import use_threads, with_pinned_checkpoints
from ludic.run.names import CONFIG
from ludic.run.parts.episodes import make_rewards
from ludic.run.parts.loggers import make_loggers
from ludic.run.policies import resolve_run
from ludic.run.protocols.agents import uses_gateway
from ludic.run.resolve import ResolvedRun
from ludic.run.session import Session, StoredSession, TrainingLoop
from ludic.run.settings import read_toml, refuse, with_given, with_values
from ludic.run.several import SeveralPolicies
from ludic.tasks import cancel_all, long_lived_objects_exempt
from ludic.training import TeeLogger
from ludic.training.checkpoint.manager import CheckpointError
from ludic.types import ConfigError, LudicError, PolicyGone, Rollout
from ludic.types.errors import TryAgain
from ludic.util.stop import StopSignal, run_sync

T = TypeVar("T")


class RunFailed(LudicError):
    """The run cannot go on; the message says from where it can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The end of a call of `train` or `resume`."""

    step: int
    """Updates that are done, of all calls together."""
    stopped_by: str | None
    """The signal that stopped it early, or the reason that was given to `trainer.stop`; None if it ran to its end."""
    seconds: float
    stats: dict[str, float]
    """Numbers of the last update."""


class Run:
    """A run: settings, and once it trains or evaluates also model, engine and trainer. `close` frees them.

    Methods may be called from a script and from a notebook, where an event loop runs already; `train_async` is for async code.
    """

    def __init__(self, resolved: ResolvedRun, *, is_stored: bool = False) -> None:
        """`is_stored`: the settings come from a run folder, so trained weights may be there."""
        self.resolved = resolved
        self._is_stored = is_stored
        self.trainer: TrainingLoop | None = None
        self.session: Session | None = None
        self._logger: TeeLogger | None = None
        self._start: tuple[bool, ResumePoint] | None = None
        self._closing = contextlib.ExitStack()

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def folder(self) -> Path:
        return self.resolved.folder

    @property
    def step(self) -> int:
        """Updates that are done."""
        return 0 if self.trainer is None else self.trainer.step

    def starting_point(self, *, resume: bool = False) -> ResumePoint:
        """The point at which the run would begin; ConfigError if its folder holds another run. Nothing is written."""
        if self._start is None or self._start[0] != resume:  # a damaged checkpoint is warned of once
            self._start = (resume, resume_point(self.resolved, resume=resume))
        return self._start[1]

    def plan(self, *, resume: bool = False) -> list[str]:
        """The plan of the run, in sentences. Most mistakes are found here, without loading weights."""
        return plan_lines(self.resolved, self.starting_point(resume=resume))

    # --- training ---

    def prepare(self, steps: int | None = None, *, resume: bool = False) -> None:
        """Check, load and connect everything that training needs; `train` and `resume` call it. Once it is there, only the
        number of steps changes."""
        if steps is not None:
            done = self.step if self.trainer is not None else saved_step(self.folder) if resume else 0
            self._set_steps(done + steps)
        if self.trainer is not None:
            return
        run, start = self.resolved, self.starting_point(resume=resume)
        self._start = None  # training changes the answer
        session = self._open_session(start, to_train=True)
        prepare_folder(run, start)
        session.begin(resume=resume, first_step=start.first_step)
        self._logger = self._closing.enter_context(contextlib.closing(make_loggers(run, session.status)))
        with self._explained():
            self.trainer = session.loop(self._logger, start)

    def train(self, steps: int | None = None) -> TrainResult:
        """Make `steps` more updates; without it, what is left of the settings' `steps`. Saves at the end and on Ctrl-C."""
        self.prepare(steps)
        return self._sync(self.train_async())

    def resume(self, steps: int | None = None) -> TrainResult:
        """Go on with the run in the folder, from its newest checkpoint; `steps` as for `train`."""
        self.prepare(steps, resume=True)
        return self._sync(self.train_async())

    async def train_async(self, steps: int | None = None, *, resume: bool = False) -> TrainResult:
        """`train` and `resume` for async code."""
        await asyncio.to_thread(self.prepare, steps, resume=resume)
        trainer, session = self.trainer, self.session
        assert trainer is not None and session is not None, "prepare makes them"
        began = time.perf_counter()
        with self._explained(), failure_written(self.folder), long_lived_objects_exempt():
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(cancel_all, [asyncio.create_task(self._show_activity())])
                await stack.enter_async_context(session.sampling())
                stats = await trainer.train(self.resolved.steps - trainer.step)
            if trainer.step >= self.resolved.steps:
                await session.finished(self.resolved, trainer.step)
        return TrainResult(
            step=trainer.step,
            stopped_by=trainer.stop.reason if trainer.stop.is_set else None,
            seconds=time.perf_counter() - began,
            stats=stats,
        )

    # --- evaluation ---

    def evaluate(self) -> EvalReport:
        """Evaluate the current weights on the run's evaluation tasks (`eval_episodes`, `eval_data`, `eval_temperature`).

        Before the first update these are the weights that the run begins with; nothing is written to the run folder.
        """
        return self._sync(self._session_to_evaluate().evaluate())

    async def evaluate_async(self) -> EvalReport:
        """`evaluate` for async code."""
        return await (await asyncio.to_thread(self._session_to_evaluate)).evaluate()

    def play(self) -> list[Rollout]:
        """Play the run's evaluation tasks with the current weights, as `evaluate` does, and return the episodes."""
        return self._sync(self._session_to_evaluate().play())

    # --- the end ---

    def close(self) -> None:
        """Free the model, end the engine, the servers and the loggers. The run folder stays; `resume` works on a new Run."""
        self._closing.close()
        self.trainer = self.session = self._logger = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- internals ---

    def _sync(self, work: Coroutine[Any, Any, T]) -> T:
        return run_sync(work, stop=lambda: StopSignal() if self.trainer is None else self.trainer.stop)

    def _session_to_evaluate(self) -> Session:
        refuse(self._evaluation_problems())
        return self._open_session(ResumePoint())

    def _evaluation_problems(self) -> Iterator[str]:
        """A run that cannot be evaluated by itself; so is one of `load` that was not resumed."""
        if self.resolved.policies:
            yield f"This run has several policies; evaluate one: `ludic eval {self.folder}/policies/NAME`."
        if self.resolved.envs:
            yield "This run has several envs: trainer.eval() evaluates them all, `ludic eval ENV --model RUN` one."
        if self.config.stored is not None and not self.config.env.id:
            yield "An evaluation plays an env, and this run names none. Give one as TARGET, or env=."
        saved = latest_checkpoint(self.folder) if self._is_stored and self.session is None else None
        if saved is not None:
            yield (
                f"The weights of {saved} are not loaded. Call resume() first, or use `ludic eval {self.folder}`, which compares "
                "the first and the newest weights."
            )

    def _open_session(self, start: ResumePoint, *, to_train: bool = False) -> Session:
        if self.session is None:
            kind = session_class(self.resolved)
            kind.check(self.resolved)  # what is wrong is named before a large model is loaded
            if to_train:
                kind.open(self.resolved)
            use_threads(self.config.model)
            self.session = kind(self.resolved, start)
            self._closing.callback(self.session.close)
        return self.session

    def _set_steps(self, steps: int) -> None:
        """`steps` updates in all. A learning-rate schedule depends on the total, so that stays as it was at the first step."""
        schedule, is_running = self.config.trainer.lr_schedule, self.trainer is not None
        if is_running and schedule is not None and schedule.kind != "constant" and steps != self.resolved.steps:
            raise ConfigError(
                f"schedule = {schedule.kind!r} ends at step {self.resolved.steps}, so {steps} steps are another run. Give all "
                "steps in the first call, or schedule = 'constant'."
            )
        config = with_values(self.config, {"steps": steps})
        self.resolved = resolve_run(config, self.resolved.env, self.resolved.parts)
        self._start = None
        if is_running:
            write_config(self.resolved)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise failures that may be transient as RunFailed, with how to resume."""
        try:
            yield
        except (TryAgain, FloatingPointError):  # subclasses of OSError and PolicyGone that callers handle themselves
            raise
        except (CheckpointError, OSError, PolicyGone, TooManyFailures, WeightPushError) as error:
            raise RunFailed(f"{error} To go on: {how_to_resume(self.resolved)}") from error

    async def _show_activity(self) -> None:
        """Show what is being played, every second: the first update can take minutes."""
        while self.session is not None and self._logger is not None:
            await asyncio.sleep(1.0)
            self._logger.show_activity(self.session.activity() or "updating or saving the weights")


def session_class(run: ResolvedRun) -> type[Session]:
    """The class of the run's session: engines of plug-ins have their own."""
    if run.policies:
        return SeveralPolicies
    usual = StoredSession if run.config.stored is not None else engine_of(run.config).session_class()
    return run.parts.session or usual


# --- making a run ----------------------------------------------------------------------------------------------


def build(
    config: RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    agent: str | Callable[..., Any] | None = None,
    parser: str | Callable[[str], Any] | None = None,
    tools: Sequence[Any] = (),
    algo: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    data: str | Path | Sequence[Any] | Callable[..., Any] | None = None,
    reward: Any = None,
    policies: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """A run from a config, from settings by name (every flag of `ludic train`, with underscores), or from both: settings win.

    env, agent, context, parser, protocol, tools, algo, model and logger take a name or an object: an env class, an agent class, a
    parser, callables as tools, an RLAlgorithm, a `LoadedModel` or a torch model with its `tokenizer`, TrainingLoggers. `loss`
    replaces the algorithm's, an object as `protocol` the agent with all its parts; `source` wraps the source of fresh rollouts;
    `reducers` are further metrics (`Parts` in given.py). An agent may also be a function that makes its model calls over HTTP
    (docs/gateway.md): its `reward` is `f(task, answer, session)`, and `policies` are clients. `policies` is otherwise a table of
    settings by name, and all of them learn (docs/multi_policy.md). `reward` is otherwise a function `f(rollout)`, a name, a scorer,
    or a list of these (docs/rewards.md). data and eval_data take a file, a list of samples, or a function that generates them.
    Settings are checked here; weights are loaded when the run trains or evaluates.
    """
    config = config or RunConfig()
    tables = {"envs": settings.pop("envs", config.envs)}
    if policies and all(isinstance(each, (PolicyEntry, dict)) for each in policies.values()):
        tables["policies"], policies = policies, None
    config = with_given(config, tables)
    named = env or config.env.id or (config.envs[0].id if config.envs else no_env())
    server = settings.get("env_server", config.env.env_server)
    factory = named if isinstance(named, EnvFactory) else env_factory(named, server=server)
    given = {"agent": agent, "parser": parser, "algo": algo, "data": data, "reward": reward, "tools": tools}
    given["model"] = _loaded(model, tokenizer)
    objects: dict[str, Any] = {name: settings.pop(name, None) for name in ("loss", "source")}
    objects |= {"reducers": settings.pop("reducers", None) or {}, "policies": policies or {}}
    values = {**settings, "id": "" if config.envs and env is None else factory.id}
    for argument, (field, read) in _PARTS.items():
        value, part = read(given.get(argument, settings.get(argument)))
        values.pop(argument, None)
        values |= {} if value is None else {argument: value}
        objects |= {} if part is None else {field: part}
    values["tools"] = (*config.agent.tools, *values["tools"])
    parts = Parts(**objects)
    config = with_pinned_checkpoints(with_given(config, values), parts)
    if not config.env_ids and config.stored is None:
        refuse(stored_problems(config, parts))
        raise ConfigError("No env: give env=, an id (`ludic envs` lists them), file.py:Class, or a class.")
    if callable(reward) and uses_gateway(config.agent, parts):
        parts = replace(parts, reward=reward, scorers=())
    run = resolve_run(config, factory, parts)
    for own in run.each if reward is not None else ():
        make_rewards(own.config.reward, own.config.agent, parts)  # a wrong one is found now
    return Run(run)


NameAndObject: TypeAlias = tuple[Any, Any]
"""The value of a setting that an argument of `build` gives, and the object; None where there is none."""


def _part(given: Any) -> NameAndObject:
    """The name of a part; or an object, which the settings call by its place in the code."""
    return (given, None) if given is None or isinstance(given, str) else (registry.name_of(given), given)


def _several(given: Any) -> NameAndObject:
    """Names and objects, mixed; or a single one."""
    if given is None:
        return None, None
    several = (given,) if isinstance(given, str) or not isinstance(given, Sequence) else given
    names = tuple(each for each in several if isinstance(each, str))
    return names, tuple(each for each in several if not isinstance(each, str))


def _samples(given: Any) -> NameAndObject:
    """A file, or the samples themselves, or a function that generates them."""
    if isinstance(given, (str, Path)):
        return Path(given), None
    return None, given if given is None or callable(given) else list(given)


def _model(given: str | LoadedModel | None) -> NameAndObject:
    return (given.name, given) if isinstance(given, LoadedModel) else (given, None)


def _loaded(given: Any, tokenizer: Any) -> str | LoadedModel | None:
    """A name, or a loaded model; a torch model is one with its tokenizer."""
    if given is None or isinstance(given, (str, Path)):
        return None if given is None else str(given)
    name = type(given).__name__
    if not isinstance(given, LoadedModel) and tokenizer is None:
        raise ConfigError(f"model is a {name}; give its tokenizer as well: build(model=…, tokenizer=…).")
    return given if isinstance(given, LoadedModel) else LoadedModel(given, tokenizer, name)


_PARTS: Mapping[str, tuple[str, Callable[[Any], NameAndObject]]] = {
    "agent": ("agent", _part),
    "context": ("context", _part),
    "parser": ("parser", _part),
    "protocol": ("protocol", _part),
    "algo": ("algorithm", _part),
    "model": ("model", _model),
    "tools": ("tools", _several),
    "logger": ("loggers", _several),
    "reward": ("scorers", _several),
    "data": ("samples", _samples),
    "eval_data": ("eval_samples", _samples),
}
"""Arguments of `build` that take a name or an object -> field of `Parts`, and how to tell the two apart."""


def load(folder: str | Path, *, env: str | Callable[..., Any] | None = None, **settings: Any) -> Run:
    """The run in a folder, to be resumed; `env` and settings as for `build`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run: there is no {path}.")
    return Run(build(read_toml(RunConfig, path), env=env, **settings).resolved, is_stored=True)
