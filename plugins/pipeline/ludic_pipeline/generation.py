"""The learner's end of a pipeline: samples from a queue in Redis, weights to a folder or to servers."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ludic.distributed.folder import FolderPublisher
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.models.lora import dense_parameters
from ludic.run.folder import ResumePoint
from ludic.run.model import ServedPolicy, local_engine
from ludic.run.names import WEIGHTS
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.resolve import ResolvedRun
from ludic.run.session import PolicySession
from ludic.training import RLAlgorithm
from ludic.training.credit_assignment import EpisodeCredit, HybridNormalizedReturn
from ludic.training.losses import CorrectedLoss, SequenceMask, TokenMask
from ludic.types import ConfigError, FollowsDrift, LudicError
from ludic.util.stop import run_sync
from ludic_pipeline.feature import given_redis, pipeline_of, queue_key_of, redis_url, required_servers
from ludic_pipeline.queue.connection import require_redis
from ludic_pipeline.queue.queue import ExperienceQueue
from ludic_pipeline.queue.source import PipelineBatchSource
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.generation import START_S, client_of, served_name

logger = logging.getLogger(__name__)

_SERVER_AWAY_S = 600.0
"""Seconds that publishing waits for a server that is down: as long as a large model takes to load."""
_FAREWELL_S = 10.0
"""Seconds that a learner which is done waits for Redis."""

TOKEN_BAND, SAMPLE_BAND = (0.125, 8.0), (0.5, 2.0)
"""Ratios of trained to sampled probability that count: of a token, and on the geometric mean of a sample.

Samples of a pipeline are older than those of a run that plays its own episodes, and the clipping of the losses bounds only one
side: a token with a negative weight that has become much likelier since keeps its full, growing gradient. Masks and no
truncation, since the losses multiply by the ratio already. The bands are wide: at a lag of a few updates nearly everything is
inside."""


class PipelineSession(PolicySession):
    """Samples come from a queue. To evaluate it uses the servers, or an engine in this process that shares the weights. See
    docs/pipeline.md."""

    def __init__(self, run: ResolvedRun, start: ResumePoint) -> None:
        super().__init__(run, start)
        self.algorithm = pipeline_algorithm(run)
        self._served: ServedPolicy | None = None
        if pipeline_of(run.config).actor_engine == "vllm":
            self._served = self._on_servers()
        elif run.config.is_evaluated:
            self._served = self._in_this_process()
        if self._served is not None:
            self._closing.callback(self._served.close)
        self.publisher = FolderPublisher(run.folder / WEIGHTS) if self._served is None else self._served.publisher
        pipeline, size = pipeline_of(run.config), run.config.rollouts.rollouts_per_update
        self.source = self._queue = PipelineBatchSource(
            redis_url(pipeline),
            queue_key_of(run),
            size,
            max_lag=run.max_lag,
            acknowledge=pipeline.acknowledge,
            versions_per_batch=run.trainer.steps_per_batch,
        )

    @staticmethod
    async def finished(run: ResolvedRun, num_updates: int) -> None:
        await mark_finished(run, num_updates)

    @staticmethod
    def check(run: ResolvedRun) -> None:
        PolicySession.check(run)
        require_redis("engine = 'pipeline'")
        redis_url(pipeline_of(run.config))
        if pipeline_of(run.config).actor_engine == "vllm":
            required_servers(run.config.rollouts.server)
        pipeline_algorithm(run)

    @staticmethod
    def open(run: ResolvedRun) -> None:
        """Removes the mark of an earlier, finished run of this name: actors that start while the model loads would end by it."""
        run_sync(_reopen_queue(run))

    def begin(self, *, resume: bool, first_step: int) -> None:
        """An empty queue for a new run, and weights that actors can begin with."""
        if not resume:
            run_sync(clear_queue(self._run))
        assert self.publisher is not None, "__init__ has made one"
        if not first_step:  # a trainer that is resumed publishes its own version
            self.publisher.publish(dict(dense_parameters(self._loaded.model)), version=0)

    def _evaluation(self) -> tuple[ServedPolicy, EpisodeSetup]:
        if self._served is None:
            raise ConfigError("This pipeline does not evaluate; set eval_every or eval_at_start, or use `ludic eval`.")
        return self._served, self._setup(self._served)

    def status(self) -> str:
        return self._queue.stats().identity()

    def activity(self) -> str:
        return "waiting for samples of the actors" if self._queue.is_waiting else ""

    def _on_servers(self) -> ServedPolicy:
        """The same servers as the actors use."""
        from ludic.distributed import create_vllm_publisher

        client, model = connect_to_servers(self._run)
        transport = self._run.config.rollouts.transport
        publisher = create_vllm_publisher(client, transport=transport, wait_s=_SERVER_AWAY_S)
        return ServedPolicy(client=client, publisher=publisher, close=lambda: run_sync(client.close()), model=model)

    def _in_this_process(self) -> ServedPolicy:
        trainer = self._run.trainer
        engine = local_engine(self._loaded, max_length=trainer.max_seq_len, concurrency=trainer.eval_concurrency)
        return ServedPolicy(
            client=engine,
            publisher=_FolderAndEngine(FolderPublisher(self._run.folder / WEIGHTS), engine),
            snapshot=partial(EngineSnapshot, engine, max_sequences=engine.max_sequences),
            close=engine.close,
            model=self._loaded.name,
        )


def pipeline_algorithm(run: ResolvedRun) -> RLAlgorithm:
    """The run's algorithm, its loss corrected for samples of older versions."""
    algorithm = make_algorithm(run)
    rule = algorithm.credit_assigner
    if isinstance(rule, EpisodeCredit):
        rule = rule.inner
    if isinstance(rule, HybridNormalizedReturn):
        raise ConfigError(
            f"algo = {run.config.algo.algo!r} scales weights by the whole batch, but actors assign credit group by group. "
            "Take cispo, which has the same loss, or another (`ludic parts algorithm`)."
        )
    if isinstance(rule, FollowsDrift):
        raise ConfigError(
            f"algo = {run.config.algo.algo!r} tracks how each prompt went, but every actor would track only its own, and "
            "none is told how far the policy moves. Take grpo, or train without a pipeline."
        )
    if not pipeline_of(run.config).corrections or not algorithm.loss.needs.old_logps:
        return algorithm  # imitation takes no ratio
    corrected = CorrectedLoss(algorithm.loss, [TokenMask(*TOKEN_BAND), SequenceMask(*SAMPLE_BAND)])
    return replace(algorithm, loss=corrected)


def connect_to_servers(run: ResolvedRun) -> tuple[VLLMChatClient, str]:
    """A client of a pipeline's servers, and their name of the model. Waits until all of them answer: one that was started
    together with this process is still loading."""
    servers = required_servers(run.config.rollouts.server)
    client = client_of(run.config.rollouts, servers, run.folder, start_s=START_S)
    return client, run_sync(served_name(client))


async def clear_queue(run: ResolvedRun) -> None:
    """Remove what an earlier run of the same name left."""
    async with ExperienceQueue(redis_url(pipeline_of(run.config)), queue_key_of(run)) as queue:
        await queue.clear()


async def _reopen_queue(run: ResolvedRun) -> None:
    """Remove the mark of `mark_finished`, and nothing else."""
    async with ExperienceQueue(redis_url(pipeline_of(run.config)), queue_key_of(run)) as queue:
        await queue.reopen()


async def mark_finished(run: ResolvedRun, num_updates: int) -> None:
    """Tell the actors of a pipeline that there is nothing left to do; they end. Where Redis fails they are not told: the run is
    saved, and must not fail after its end. Nor are they while another learner works on the run."""
    if given_redis(pipeline_of(run.config)) is None:
        return
    from redis.exceptions import RedisError

    url, key = redis_url(pipeline_of(run.config)), queue_key_of(run)
    try:
        async with ExperienceQueue(url, key, patience_s=_FAREWELL_S) as queue:
            is_told = await queue.finish(num_updates)
    except (LudicError, RedisError) as error:
        logger.warning("the actors are not told that the run is finished: %s", error)
        return
    if not is_told:
        logger.warning("another learner works on %s, so its actors continue", run.folder)


class _FolderAndEngine:
    """Publishes weights to a folder; the engine that evaluates shares the trainer's weights and only gets the new version. It
    is idle whenever the weights change: training waits for an evaluation, or evaluates a copy."""

    def __init__(self, folder: FolderPublisher, engine: LocalEngine) -> None:
        self._folder = folder
        self._engine = engine

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._engine.new_version(version)
        self._folder.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        return self._folder.is_current(version)
