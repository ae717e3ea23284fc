"""`Session`: what a run consists of once its weights are loaded, from samples to the loop that trains on them.

`PolicySession` is that of a run with one policy: `EmbeddedSession` plays with the engine in this process, `StoredSession` reads
texts of a file, and engines of plug-ins have their own. Several policies that learn together are in several.py.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ludic.batch_gen import AsyncRolloutBatchSource, PreferenceBatchSource, RolloutBatchSource
from ludic.eval import EvalReport, SnapshotEvaluator
from ludic.inference import ByteTemplate, ChatTemplate
from ludic.inference.local import LocalEngine
from ludic.models.loading import LoadedModel
from ludic.run.checks import PREFERENCE_ALGORITHMS, teacher_problems
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.features.base import Around
from ludic.run.features.core import features_on
from ludic.run.features.league import make_league, with_league
from ludic.run.folder import ResumePoint, rollouts_file
from ludic.run.model import ServedPolicy, load_policy, load_reference, load_teacher, make_template, serve_locally
from ludic.run.names import TRAINED
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup, check_protocol, make_episode_setup
from ludic.run.parts.requests import EnvsEvaluator, make_evaluator, play
from ludic.run.parts.samples import first_env
from ludic.run.parts.source import check_source, make_source
from ludic.run.protocols.agents import outside_agent
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import refuse
from ludic.training import RLAlgorithm, Trainer
from ludic.training.critic.gae import CriticKind
from ludic.training.learner.token_recorder import TokenRecorder
from ludic.training.multi_policy import PolicyTrainers
from ludic.types import (
    BatchSource,
    ConfigError,
    Evaluator,
    PolicyPublisher,
    Rollout,
    TrainingLogger,
    default_reducers,
)
from ludic.util.stop import StopSignal


class TrainingLoop(Protocol):
    """Makes the updates of a run: a `Trainer`, or `PolicyTrainers` for several policies in step."""

    stop: StopSignal

    @property
    def step(self) -> int:
        """Updates that are done."""

    async def train(self, num_steps: int | None = None) -> dict[str, float]:
        """Make more updates; returns the numbers of the last one."""

    async def eval(self) -> Any:
        """Evaluate the current weights, and log it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPolicy:
    """A policy that learns in a run, and what its trainer needs."""

    run: ResolvedRun
    """The settings as if the run had this policy alone."""
    name: str = ""
    """Its name among several."""
    loaded: LoadedModel
    algorithm: RLAlgorithm
    source: BatchSource
    publisher: PolicyPublisher | None
    """None where nothing plays."""
    teacher: LoadedModel | None = None
    """For losses that compare whole distributions."""
    resume_from: str | int | None


class Session(ABC):
    """The policies, samples and evaluation of one run. `check` comes before it is made; `close` frees everything."""

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        self._run, self._start = run, start
        self._closing = ExitStack()

    @staticmethod
    def check(run: ResolvedRun) -> None:
        """ConfigError for what cannot work, before weights are loaded."""
        raise NotImplementedError("Session.check")

    @staticmethod
    def open(run: ResolvedRun) -> None:
        """Called once, after `check`, before the model of a run that is to be trained is loaded."""
        return

    def begin(self, *, resume: bool, first_step: int) -> None:
        """Called once, before the first batch; the run folder is there."""
        return

    @property
    @abstractmethod
    def trained(self) -> tuple[TrainedPolicy, ...]:
        """The policies that learn, one as a rule."""

    @abstractmethod
    def evaluator(self) -> Evaluator:
        """Evaluates the current weights, or a copy of them where evaluation runs in the background."""

    def loop(self, logger: TrainingLogger, start: ResumePoint) -> TrainingLoop:
        """The loop at the step that the run begins with; several policies are evaluated and logged together."""
        self._start = start  # a session that has evaluated the first weights may go on from a checkpoint
        if not self._run.policies:
            (only,) = self.trained
            return self._trainer(only, logger)
        trainers = {policy.name: self._trainer(policy, number=number) for number, policy in enumerate(self.trained)}
        evaluator = self.evaluator() if self._run.config.is_evaluated else None
        return PolicyTrainers(trainers, logger, evaluator, self._run.trainer)

    def _trainer(self, policy: TrainedPolicy, logger: TrainingLogger | None = None, *, number: int = 0) -> Trainer:
        """Without a logger it neither logs nor evaluates: it is one of several."""
        run, algorithm = policy.run, policy.algorithm
        # A reference has the run's first weights on a resume as well.
        given, needs_reference = run.parts.model, algorithm.loss.needs.reference
        # Made also if nothing is to be recorded: it removes what an interrupted start has left.
        recorder = TokenRecorder(self._run.folder / TRAINED, every=run.config.rollouts.tokens_every, first_rank=number)
        return Trainer(
            model=policy.loaded.model,
            reference=load_reference(run.config, policy.loaded, given) if needs_reference else None,
            critic=load_weights(run, self._start).model if algorithm.critic is CriticKind.SEPARATE else None,
            algo=algorithm,
            batch_source=policy.source,
            cfg=replace(run.trainer, **_NO_EVALUATION) if logger is None else run.trainer,
            publisher=policy.publisher,
            checkpoint_config=run.checkpoint,
            resume_from=policy.resume_from,
            train_logger=logger,
            reducers={**default_reducers(), **run.parts.reducers},
            evaluator=None if logger is None or not run.config.is_evaluated else self.evaluator(),
            teacher=policy.teacher,
            tokenizer=policy.loaded.tokenizer,
            token_recorder=self._closing.enter_context(closing(recorder)),
        )

    async def evaluate(self) -> EvalReport:
        """Evaluates the current weights once."""
        raise NotImplementedError(f"{type(self).__name__} evaluates in its loop alone")

    async def play(self) -> list[Rollout]:
        """Plays the evaluation's tasks once with the current weights."""
        raise NotImplementedError(f"{type(self).__name__} plays in its loop alone")

    @staticmethod
    async def finished(run: ResolvedRun, num_updates: int) -> None:
        """Called after the last update of the run; also later, where its process may have died before."""
        return

    def status(self) -> str:
        """A line about the queue of a pipeline; empty for others."""
        return ""

    def activity(self) -> str:
        """A line about what is being generated; empty when nothing is."""
        return ""

    def sampling(self) -> AbstractAsyncContextManager[Any]:
        """Open while training: background work of the source ends with it."""
        return nullcontext()

    def close(self) -> None:
        self._closing.close()


_NO_EVALUATION: dict[str, Any] = {"eval_at_start": False, "eval_every_n_steps": None, "eval_in_background": False}


def load_weights(run: ResolvedRun, start: ResumePoint) -> LoadedModel:
    """The weights that the settings name. On a resume the checkpoint holds those of a fork, which may be gone."""
    settings = run.config.model
    if start.first_step and not settings.lora_rank:
        settings = replace(settings, fork_from=None)
    return load_policy(settings, seed=run.seed, given=run.parts.model)


class PolicySession(Session):
    """One policy that learns; a class for each way to get its samples."""

    algorithm: RLAlgorithm
    source: BatchSource
    publisher: PolicyPublisher | None
    """None where nothing plays."""
    teacher: LoadedModel | None = None
    """For losses that compare whole distributions."""

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        super().__init__(run, start)
        self._loaded = load_weights(run, start)

    @staticmethod
    def check(run: ResolvedRun) -> None:
        for own in run.each:
            outside_agent(own.config.agent, run.parts)
        refuse(teacher_problems(run, make_algorithm(run)))
        check_source(run)

    @property
    def trained(self) -> tuple[TrainedPolicy, ...]:
        return (
            TrainedPolicy(
                run=self._run,
                loaded=self._loaded,
                algorithm=self.algorithm,
                source=self.source,
                publisher=self.publisher,
                teacher=self.teacher,
                resume_from=None if self._start.checkpoint is None else str(self._start.checkpoint),
            ),
        )

    @abstractmethod
    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        """The policy, and the episodes that evaluate it."""

    def evaluator(self) -> Evaluator:
        served, setup = self._evaluation()
        if not self._run.trainer.eval_in_background or served.snapshot is None:
            return self._evaluator_of(setup)
        snapshot = served.snapshot()
        self._closing.callback(snapshot.close)
        for each in (setup, *setup.others):
            self._closing.callback(each.closing.close)
        others = tuple(replace(each, client=snapshot) for each in setup.others)
        return SnapshotEvaluator(self._evaluator_of(replace(setup, client=snapshot, others=others)), snapshot)

    def _evaluator_of(self, setup: EpisodeSetup) -> Evaluator:
        if not self._run.envs:
            return make_evaluator(self._run, setup)
        setups = zip(self._run.envs, (replace(setup, others=()), *setup.others), strict=True)
        return EnvsEvaluator({env.name: make_evaluator(env.run, own) for env, own in setups})

    async def evaluate(self) -> EvalReport:
        evaluator = make_evaluator(self._run, self._evaluation()[1])
        await evaluator.eval()
        assert evaluator.last_report is not None, "an evaluation has just ended"
        return evaluator.last_report

    async def play(self) -> list[Rollout]:
        return await play(self._run, self._evaluation()[1])

    def sampling(self) -> AbstractAsyncContextManager[Any]:
        return self.source if isinstance(self.source, AbstractAsyncContextManager) else nullcontext()

    def _setup(self, served: ServedPolicy) -> EpisodeSetup:
        """The episodes of the run's env, or of the first of several with the others."""
        made: list[EpisodeSetup] = []
        for own in self._run.each:
            config, parts = own.config, own.parts
            template = self._template(config.agent)
            setup = make_episode_setup(
                config.env, config.agent, own.env, served.client, template, served.model, parts, reward=config.reward
            )
            self._closing.callback(setup.close)
            made.append(setup if not self._run.envs else replace(setup, protocol=f"play {len(made)}"))
        return replace(made[0], others=tuple(made[1:]))

    def _template(self, agent: AgentSettings) -> ChatTemplate:
        with_tools = agent.may_call_tools or bool(self._run.parts.tools)
        return make_template(self._loaded.tokenizer, with_tools=with_tools, renderer=agent.renderer)


class EmbeddedSession(PolicySession):
    """The engine in this process plays the episodes."""

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        super().__init__(run, start)
        self._served = self._serve()
        self._closing.callback(self._served.close)
        self._episodes = self._setup(self._served)
        self.publisher, self.algorithm = self._served.publisher, make_algorithm(run)
        path = rollouts_file(run.folder, start) if run.config.rollouts.save_rollouts else None
        league = make_league(run, self._served.client) if isinstance(self._served.client, LocalEngine) else None
        if league is not None:
            self._closing.callback(league.close)
            self._episodes = with_league(run, self._episodes, league, self._template(run.config.agent))
        template = self._template(run.config.agent) if self.algorithm.needs_message_spans else None
        played = make_source(run, self._episodes, self.algorithm, jsonl_path=path, league=league, spans_by=template)
        source, around = (
            self._sampled(played),
            Around(tokenizer=self._loaded.tokenizer, algorithm=self.algorithm, closing=self._closing),
        )
        for feature in features_on(run.config, run.parts):
            source = feature.wrap(run, source, around)
        if self.algorithm.loss.needs.teacher_kl is not None:
            self.teacher = load_teacher(run, run.config.all_teachers[0])
        source = source if run.parts.source is None else run.parts.source(source)
        versions = run.trainer.steps_per_batch
        self._played = played
        self.source = source
        if run.max_lag and run.config.rollouts.close_batch_at == 1:
            self.source = AsyncRolloutBatchSource(source, max_lag=run.max_lag, versions_per_batch=versions)

    @asynccontextmanager
    async def sampling(self) -> AsyncGenerator[None, None]:
        async with super().sampling():
            try:
                yield
            finally:
                if isinstance(self._played, RolloutBatchSource):
                    await self._played.close()

    @staticmethod
    def check(run: ResolvedRun) -> None:
        PolicySession.check(run)
        for own in run.each:
            first_env(own)
        check_protocol(run)

    def _sampled(self, played: BatchSource) -> BatchSource:
        """The source of sampled batches, before others are mixed in."""
        return played

    def _serve(self) -> ServedPolicy:
        run = self._run
        concurrency = max(run.config.rollouts.concurrency or 0, run.trainer.eval_concurrency or 0)
        return serve_locally(
            self._loaded,
            max_length=run.trainer.max_seq_len,
            concurrency=concurrency or None,
            record_experts=run.trainer.replay_experts,
        )

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        return self._served, self._episodes

    def activity(self) -> str:
        return self._episodes.activity()


class StoredSession(PolicySession):
    """Comparisons or answers of a file (`--preferences`, or `--data` with sft); nothing is played while training. With an env, an
    engine in this process evaluates."""

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        super().__init__(run, start)
        self.algorithm, self.publisher = make_algorithm(run), None
        self.source = _preferences(run, self._template(run.config.agent))
        self._served: ServedPolicy | None = None
        if run.config.env.id:
            self._served = serve_locally(self._loaded, max_length=run.trainer.max_seq_len)
            self._closing.callback(self._served.close)
            self.publisher = self._served.publisher

    @staticmethod
    def check(run: ResolvedRun) -> None:
        check_preferences(run)
        if run.config.env.id:
            outside_agent(run.config.agent, run.parts)
            first_env(run)

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        assert self._served is not None, "an evaluation is refused where the run names no env"
        return self._served, self._setup(self._served)


def check_preferences(run: ResolvedRun) -> PreferenceBatchSource:
    """The comparisons, read with a template that needs no model; ConfigError for a file that does not suit the algorithm."""
    source, algo = _preferences(run, ByteTemplate()), run.config.algo.algo
    wanted = {"kto": "labels", "sft": "answers"}.get(algo, "pairs")
    if run.parts.algorithm is None and algo in (*PREFERENCE_ALGORITHMS, "sft") and source.kind != wanted:
        raise ConfigError(
            f"{run.config.stored} holds {source.kind}, but algo = {algo!r}: kto learns from labels, dpo and ipo from pairs, sft "
            "from answers."
        )
    return source


def _preferences(run: ResolvedRun, template: ChatTemplate) -> PreferenceBatchSource:
    rollouts, place = run.config.rollouts, run.config.stored
    assert place is not None, "the run learns from a file"
    flag, system = ("--preferences", None) if rollouts.preferences else ("--data", run.config.agent.system_prompt)
    if flag == "--data" and system is None and run.config.env.id:
        made = first_env(run)
        system = made.system_prompt_for(made.agent_ids[0])
    return PreferenceBatchSource(
        place,
        template,
        batch_size=rollouts.rollouts_per_update,
        seed=run.seed,
        flag=flag,
        system_prompt=system,
    )
