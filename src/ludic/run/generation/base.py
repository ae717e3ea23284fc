"""What every way of generation has in common: evaluation, templates, episodes of the run's envs."""

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from ludic.eval import EvalReport, SnapshotEvaluator
from ludic.inference import ChatTemplate
from ludic.models.loading import LoadedModel
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.folder import ResumePoint
from ludic.run.generation.teachers import check_teacher
from ludic.run.model import ServedPolicy, make_template
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup, make_episode_setup
from ludic.run.parts.evaluation import EnvsEvaluator, make_evaluator, play
from ludic.run.protocols.agents import outside_agent
from ludic.run.resolve import ResolvedRun
from ludic.run.sources import check_source
from ludic.training import RLAlgorithm
from ludic.types import BatchSource, ConfigError, Evaluator, PolicyPublisher, Rollout


class Generation(ABC):
    """Source, publisher and evaluator of one run. Made after the model is loaded; `check` comes before."""

    algorithm: RLAlgorithm
    source: BatchSource
    publisher: PolicyPublisher | None
    """None where nothing plays."""
    teacher: LoadedModel | None = None
    """For losses that compare whole distributions."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        self._run, self._start = run, start
        self._loaded = loaded
        self._closing = ExitStack()

    @staticmethod
    def check(run: ResolvedRun) -> None:
        """ConfigError for what cannot work, before weights are loaded."""
        for own in run.each:
            outside_agent(own.config.agent, run.parts)
        check_teacher(run, make_algorithm(run))
        check_source(run)

    @staticmethod
    def open(run: ResolvedRun) -> None:
        """Called once, after `check`, before the model of a run that is to be trained is loaded."""
        return

    def begin(self, *, resume: bool, first_step: int) -> None:
        """Called once, before the first batch; the run folder is there."""
        return

    @abstractmethod
    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        """The policy, and the episodes that evaluate it."""

    def evaluator(self) -> Evaluator:
        """For the trainer: evaluates the current weights, or a copy of them where evaluation runs in the background."""
        served, setup = self._evaluation()
        if not self._run.trainer.eval_in_background or served.snapshot is None:
            return self._evaluator_of(setup)
        snapshot = served.snapshot()
        self._closing.callback(snapshot.close)
        for each in (setup, *setup.beside):
            self._closing.callback(each.closing.close)
        beside = tuple(replace(each, client=snapshot) for each in setup.beside)
        return SnapshotEvaluator(self._evaluator_of(replace(setup, client=snapshot, beside=beside)), snapshot)

    def _evaluator_of(self, setup: EpisodeSetup) -> Evaluator:
        if not self._run.envs:
            return make_evaluator(self._run, setup)
        setups = zip(self._run.envs, (replace(setup, beside=()), *setup.beside), strict=True)
        return EnvsEvaluator({env.name: make_evaluator(env.run, own) for env, own in setups})

    def _require_one_env(self) -> None:
        if self._run.envs:
            raise ConfigError(
                "This run has several envs: trainer.eval() evaluates them all, `ludic eval ENV --model RUN` one."
            )

    async def evaluate(self) -> EvalReport:
        """Evaluates the current weights once."""
        self._require_one_env()
        evaluator = make_evaluator(self._run, self._evaluation()[1])
        await evaluator.eval()
        assert evaluator.last_report is not None, "an evaluation has just ended"
        return evaluator.last_report

    async def play(self) -> list[Rollout]:
        """Plays the evaluation's tasks once with the current weights."""
        self._require_one_env()
        return await play(self._run, self._evaluation()[1])

    def status(self) -> str:
        """A line about the queue of a pipeline; empty for others."""
        return ""

    def activity(self) -> str:
        """What is being generated now; empty when nothing is."""
        return ""

    def sampling(self) -> AbstractAsyncContextManager[Any]:
        """Open while training: background work of the source ends with it."""
        return self.source if isinstance(self.source, AbstractAsyncContextManager) else nullcontext()

    def close(self) -> None:
        self._closing.close()

    def _setup(self, served: ServedPolicy) -> EpisodeSetup:
        """Of the run's env, or of the first of several with the others beside it."""
        made: list[EpisodeSetup] = []
        for own in self._run.each:
            config, parts = own.config, own.parts
            template = self._template(config.agent)
            setup = make_episode_setup(
                config.env, config.agent, own.env, served.client, template, served.model, parts, reward=config.reward
            )
            self._closing.callback(setup.close)
            made.append(setup if not self._run.envs else replace(setup, protocol=f"play {len(made)}"))
        return replace(made[0], beside=tuple(made[1:]))

    def _template(self, agent: AgentSettings) -> ChatTemplate:
        with_tools = agent.may_call_tools or bool(self._run.parts.tools)
        return make_template(self._loaded.tokenizer, with_tools=with_tools, renderer=agent.renderer)
