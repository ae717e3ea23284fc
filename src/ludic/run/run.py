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
from ludic.run.checks import check_stored_kind
from ludic.run.config.run_config import RunConfig
from ludic.run.dry_run import plan_lines
from ludic.run.features.engines import engine_of
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
from ludic.run.generation.base import Generation
from ludic.run.generation.in_process import PreferenceGeneration
from ludic.run.given import EnvFactory, Parts, env_factory, no_env
from ludic.run.model import load_policy, load_reference, use_threads, with_pinned_checkpoints
from ludic.run.names import CONFIG, TRAINED
from ludic.run.parts.loggers import make_loggers
from ludic.run.parts.rewards import make_rewards
from ludic.run.policies.entry import PolicyEntry
from ludic.run.policies.resolve import resolve_run
from ludic.run.policies.team import Team, check_team
from ludic.run.protocols.agents import uses_gateway
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import read_toml, with_given, with_values
from ludic.tasks import cancel_all, long_lived_objects_exempt
from ludic.training import TeeLogger, Trainer
from ludic.training.checkpoint.manager import CheckpointError
from ludic.training.critic.critic import CriticKind
from ludic.training.learner.stop import StopSignal, run_sync
from ludic.training.learner.token_recorder import TokenRecorder
from ludic.training.multi_policy import PolicyTrainers
from ludic.types import BatchSource, ConfigError, LudicError, PolicyGone, Reducer, Rollout, default_reducers
from ludic.types.errors import TryAgain

T = TypeVar("T")


class RunFailed(LudicError):
    """The run cannot go on; the message says from where it can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a call of `train` or `resume` ended."""

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
        self.trainer: Trainer | PolicyTrainers | None = None
        self.generation: Generation | Team | None = None
        self._logger: TeeLogger | None = None
        self._loaded: LoadedModel
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
        """Where the run would begin; ConfigError if its folder holds another run. Nothing is written."""
        if self._start is None or self._start[0] != resume:  # a damaged checkpoint is warned of once
            self._start = (resume, resume_point(self.resolved, resume=resume))
        return self._start[1]

    def plan(self, *, resume: bool = False) -> list[str]:
        """What the run is going to do, in sentences. Most mistakes are found here, without loading weights."""
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
        generation = self._generation(start, to_train=True)
        prepare_folder(run, start)
        generation.begin(resume=resume, first_step=start.first_step)
        self._logger = self._closing.enter_context(contextlib.closing(make_loggers(run, generation.status)))
        with self._explained():
            if isinstance(generation, Team):
                self.trainer = generation.trainers(self._logger)
            else:
                self.trainer = self._make_trainer(generation, start)

    def _make_trainer(self, generation: Generation, start: ResumePoint) -> Trainer:
        run = self.resolved
        return Trainer(
            model=self._loaded.model,
            reference=self._reference(generation),
            critic=self._load(start).model if generation.algorithm.critic is CriticKind.SEPARATE else None,
            algo=generation.algorithm,
            batch_source=generation.source,
            cfg=run.trainer,
            publisher=generation.publisher,
            checkpoint_config=run.checkpoint,
            resume_from=None if start.checkpoint is None else str(start.checkpoint),
            train_logger=self._logger,
            reducers={**default_reducers(), **run.parts.reducers},
            evaluator=generation.evaluator() if run.config.is_evaluated else None,
            teacher=generation.teacher,
            tokenizer=self._loaded.tokenizer,
            token_recorder=self._token_recorder(),
        )

    def _token_recorder(self) -> TokenRecorder:
        """Also if nothing is to be recorded: it removes what an interrupted start has left."""
        recorder = TokenRecorder(self.folder / TRAINED, every=self.config.rollouts.tokens_every)
        return self._closing.enter_context(contextlib.closing(recorder))

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
        trainer, generation = self.trainer, self.generation
        assert trainer is not None and generation is not None, "prepare makes them"
        began = time.perf_counter()
        with self._explained(), failure_written(self.folder), long_lived_objects_exempt():
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(cancel_all, [asyncio.create_task(self._show_activity())])
                await stack.enter_async_context(generation.sampling())
                stats = await trainer.train(self.resolved.steps - trainer.step)
            if trainer.step >= self.resolved.steps:
                await engine_of(self.config).finished(self.resolved, trainer.step)
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
        return self._sync(self._generation_to_evaluate().evaluate())

    async def evaluate_async(self) -> EvalReport:
        """`evaluate` for async code."""
        return await (await asyncio.to_thread(self._generation_to_evaluate)).evaluate()

    def play(self) -> list[Rollout]:
        """Play the run's evaluation tasks with the current weights, as `evaluate` does, and return the episodes."""
        return self._sync(self._generation_to_evaluate().play())

    # --- the end ---

    def close(self) -> None:
        """Free the model, end the engine, the servers and the loggers. The run folder stays; `resume` works on a new Run."""
        self._closing.close()
        self.trainer = self.generation = self._logger = None

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

    def _generation_to_evaluate(self) -> Generation:
        """ConfigError for a run of `load` that was not resumed: its trained weights are not loaded yet."""
        if self.resolved.policies:
            raise ConfigError(f"This run has several policies; evaluate one: `ludic eval {self.folder}/policies/NAME`.")
        saved = latest_checkpoint(self.folder) if self._is_stored and self.generation is None else None
        if saved is not None:
            raise ConfigError(
                f"The weights of {saved} are not loaded. Call resume() first, or use `ludic eval {self.folder}`, which compares "
                "the first and the newest weights."
            )
        generation = self._generation(ResumePoint())
        assert isinstance(generation, Generation), "there is one policy"
        return generation

    def _generation(self, start: ResumePoint, *, to_train: bool = False) -> Generation | Team:
        if self.generation is None and self.resolved.policies:
            check_team(self.resolved)
            use_threads(self.config.model)
            self.generation = Team(self.resolved, start)
            self._closing.callback(self.generation.close)
        elif self.generation is None:
            stored = self.config.stored is not None
            usual = PreferenceGeneration if stored else engine_of(self.config).generation_class()
            kind = self.resolved.parts.generation or usual
            kind.check(self.resolved)  # what is wrong is named before a large model is loaded
            if to_train:
                kind.open(self.resolved)
            use_threads(self.config.model)
            self._loaded = self._load(start)
            self.generation = kind(self.resolved, self._loaded, start)
            self._closing.callback(self.generation.close)
        return self.generation

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

    def _load(self, start: ResumePoint) -> LoadedModel:
        settings = self.config.model
        if start.first_step and not settings.lora_rank:
            settings = replace(settings, fork_from=None)  # the checkpoint holds all weights; the fork may be gone
        return load_policy(settings, seed=self.resolved.seed, given=self.resolved.parts.model)

    def _reference(self, generation: Generation) -> Any:
        """Also on a resume the weights that the run began with."""
        if not generation.algorithm.loss.needs.reference:
            return None
        return load_reference(self.config, self._loaded, self.resolved.parts.model)

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
        while self.generation is not None and self._logger is not None:
            await asyncio.sleep(1.0)
            self._logger.show_activity(self.generation.activity() or "updating or saving the weights")


# --- making a run ----------------------------------------------------------------------------------------------


def build(
    config: RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    agent: str | Callable[..., Any] | None = None,
    context: str | Callable[..., Any] | None = None,
    parser: str | Callable[[str], Any] | None = None,
    tools: Sequence[Any] = (),
    algo: Any = None,
    loss: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    data: str | Path | Sequence[Any] | Callable[..., Any] | None = None,
    eval_data: str | Path | Sequence[Any] | Callable[..., Any] | None = None,
    logger: Any = None,
    reward: Any = None,
    policies: Mapping[str, Any] | None = None,
    protocol: str | Callable[..., Any] | None = None,
    source: Callable[[BatchSource], BatchSource] | None = None,
    reducers: Mapping[str, Reducer] | None = None,
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
    is_several = bool(config.envs or settings.get("envs"))
    if is_several:
        config = with_given(config, {"envs": settings.pop("envs", config.envs)})
    if policies and all(isinstance(each, (PolicyEntry, dict)) for each in policies.values()):
        config, policies = with_given(config, {"policies": policies}), None
    named = env or config.env.id or (config.envs[0].id if is_several else no_env())
    server = settings.get("env_server", config.env.env_server)
    factory = named if isinstance(named, EnvFactory) else env_factory(named, server=server)
    given = {
        "agent": _part(agent),
        "context": _part(context),
        "parser": _part(parser),
        "protocol": _part(protocol),
        "algo": _part(algo),
        "model": _model(model, tokenizer),
        "tools": _several(tools),
        "logger": _several(logger),
        "reward": _several(reward),
        "data": _samples(data),
        "eval_data": _samples(eval_data),
    }
    values = {**settings, **{name: value for name, (value, _) in given.items() if value is not None}, "id": factory.id}
    if is_several and env is None:
        values["id"] = ""
    values["tools"] = (*config.agent.tools, *values["tools"])
    objects = {_PARTS.get(name, name): part for name, (_, part) in given.items() if part is not None}
    objects |= {"loss": loss, "source": source, "reducers": reducers or {}}
    parts = Parts(**objects, policies=policies or {})
    config = with_pinned_checkpoints(with_given(config, values), parts)
    if not config.env_ids and config.stored is None:
        check_stored_kind(config, parts)
        raise ConfigError("No env: give env=, an id (`ludic envs` lists them), file.py:Class, or a class.")
    if callable(reward) and uses_gateway(config.agent, parts):
        parts = replace(parts, reward=reward, scorers=())
    run = resolve_run(config, factory, parts)
    for own in run.each if reward is not None else ():
        make_rewards(own.config.reward, own.config.agent, parts)  # a wrong one is found now
    return Run(run)


_PARTS = {"algo": "algorithm", "logger": "loggers", "data": "samples", "eval_data": "eval_samples", "reward": "scorers"}
"""Argument of `build` -> field of `Parts`, where their names differ."""

NameAndObject: TypeAlias = tuple[Any, Any]
"""What an argument of `build` is in the settings, and the object that was given; None where there is none."""


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


def _model(given: Any, tokenizer: Any) -> NameAndObject:
    """What names a model; or a loaded one, or a torch model with its tokenizer."""
    if given is None or isinstance(given, (str, Path)):
        return None if given is None else str(given), None
    if isinstance(given, LoadedModel):
        return given.name, given
    if tokenizer is None:
        raise ConfigError(f"model is a {type(given).__name__}; give its tokenizer, too: build(model=…, tokenizer=…).")
    return type(given).__name__, LoadedModel(given, tokenizer, type(given).__name__)


def load(folder: str | Path, *, env: str | Callable[..., Any] | None = None, **settings: Any) -> Run:
    """The run in a folder, to be resumed; `env` and settings as for `build`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run: there is no {path}.")
    return Run(build(read_toml(RunConfig, path), env=env, **settings).resolved, is_stored=True)
