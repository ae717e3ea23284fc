"""Runs whose trainer gets its samples in its own process: it plays the episodes (with the engine here, or vLLM), or reads
stored comparisons."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ludic.batch_gen import (
    AsyncRolloutBatchSource,
    PreferenceBatchSource,
    RolloutBatchSource,
)
from ludic.inference import ByteTemplate, ChatTemplate
from ludic.inference.local import LocalEngine
from ludic.models.loading import LoadedModel
from ludic.run.checks import PREFERENCE_ALGORITHMS
from ludic.run.features.base import Around
from ludic.run.features.core import features_on
from ludic.run.features.league import make_league, with_league
from ludic.run.folder import ResumePoint, rollouts_file
from ludic.run.generation.base import Generation
from ludic.run.generation.teachers import load_teacher
from ludic.run.model import ServedPolicy, serve_locally
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup, check_protocol
from ludic.run.parts.samples import first_env
from ludic.run.protocols.agents import outside_agent
from ludic.run.resolve import ResolvedRun
from ludic.run.sources import make_source
from ludic.types import BatchSource, ConfigError


class EmbeddedGeneration(Generation):
    """The engine in this process plays the episodes."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        super().__init__(run, loaded, start)
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
            Around(tokenizer=loaded.tokenizer, algorithm=self.algorithm, closing=self._closing),
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
        Generation.check(run)
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


class PreferenceGeneration(Generation):
    """Comparisons or answers of a file (`--preferences`, or `--data` with sft); nothing is played while training. With an env, an
    engine in this process evaluates."""

    def __init__(self, run: ResolvedRun, loaded: LoadedModel, start: ResumePoint) -> None:
        super().__init__(run, loaded, start)
        self.algorithm, self.publisher = make_algorithm(run), None
        self.source = _preferences(run, self._template(run.config.agent))
        self._served: ServedPolicy | None = None
        if run.config.env.id:
            self._served = serve_locally(loaded, max_length=run.trainer.max_seq_len)
            self._closing.callback(self._served.close)
            self.publisher = self._served.publisher

    @staticmethod
    def check(run: ResolvedRun) -> None:
        check_preferences(run)
        if run.config.env.id:
            outside_agent(run.config.agent, run.parts)
            first_env(run)

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        if self._served is None:
            raise ConfigError("An evaluation plays an env, and this run names none. Give one as TARGET, or env=.")
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
    assert place is not None, "generation_of has looked"
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
