"""The learner of a pipeline: `ludic train --engine pipeline`. Samples come from a queue, weights go to a folder or to servers.

It has no engine to sample with, unless it evaluates: then the servers answer, or an engine in this process that shares the
weights and does nothing else. See docs/pipeline.md.
"""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ludic.batch_gen.pipeline.connection import require_redis
from ludic.batch_gen.pipeline.queue import ExperienceQueue
from ludic.batch_gen.pipeline.source import PipelineBatchSource
from ludic.distributed.publish.folder import FolderPublisher
from ludic.inference.local import LocalEngine
from ludic.inference.local.snapshot import EngineSnapshot
from ludic.models.loading import LoadedModel
from ludic.models.lora import dense_parameters
from ludic.run.build import TrainingParts, evaluator_of, make_algorithm, make_episode_setup
from ludic.run.config import RunConfig
from ludic.run.env import EnvFactory
from ludic.run.folder import WEIGHTS, ResumePoint
from ludic.run.model import ServedPolicy, local_engine, make_template
from ludic.run.pipeline import redis_url, required_servers
from ludic.training import RLAlgorithm
from ludic.training.credit_assignment import HybridNormalizedReturn
from ludic.training.losses import CorrectedLoss, SequenceMask, TokenMask
from ludic.types import ConfigError, FollowsDrift

TOKEN_BAND, SAMPLE_BAND = (0.125, 8.0), (0.5, 2.0)
"""Ratios of trained to sampled probability that count: of a token, and on the geometric mean of a sample.

Samples here are older than in a run that plays its own, and the losses' own clipping bounds only one side: a token with a
negative weight that has become much likelier since keeps its full, ever larger gradient. Masks and no truncation, since
the losses multiply by the ratio already. The bands are wide: at a lag of a few updates nearly everything is inside."""

_SERVER_AWAY_S = 600.0
"""How long publishing waits for a server that is down: as long as a large model takes to load."""


def check(config: RunConfig) -> None:
    """What cannot work, before anything is loaded."""
    require_redis("engine = 'pipeline'")
    redis_url(config.pipeline)
    if config.samples_on_vllm:
        required_servers(config.rollouts.server)
    pipeline_algorithm(config)


def pipeline_algorithm(config: RunConfig) -> RLAlgorithm:
    """The run's algorithm, its loss corrected for samples of older versions."""
    algorithm = make_algorithm(config)
    if isinstance(algorithm.credit_assigner, HybridNormalizedReturn):
        raise ConfigError(
            f"algo = {config.algo.algo!r} scales weights by the whole batch, but actors assign credit group by group. "
            "Take cispo, which has the same loss, or another (`ludic parts algorithm`)."
        )
    if isinstance(algorithm.credit_assigner, FollowsDrift):
        raise ConfigError(
            f"algo = {config.algo.algo!r} remembers how each prompt went, but every actor would remember only its own, and "
            "none hears how far the policy moves. Take grpo, or train without a pipeline."
        )
    if not config.pipeline.corrections or not algorithm.loss.needs_old_logps:
        return algorithm  # imitation takes no ratio: who sampled, and at what temperature, does not matter to it
    corrected = CorrectedLoss(algorithm.loss, [TokenMask(*TOKEN_BAND), SequenceMask(*SAMPLE_BAND)])
    return replace(algorithm, loss=corrected)


def learner_parts(
    config: RunConfig, found: EnvFactory, loaded: LoadedModel, start: ResumePoint, stack: ExitStack
) -> TrainingParts:
    """Source, publisher and, where asked for, an evaluator."""
    served = _served(config, loaded)
    if served is not None:
        stack.callback(served.close)
    evaluator = None
    if config.eval.is_on:
        assert served is not None, "somebody answers wherever there is an evaluation"
        template = make_template(loaded.tokenizer, with_tools=config.agent.may_call_tools)
        play = make_episode_setup(config.env, config.agent, found, served.client, template, served.model)
        evaluator = evaluator_of(config, served, play, stack)
    source = make_pipeline_source(config)
    return TrainingParts(
        algorithm=pipeline_algorithm(config),
        source=source,
        publisher=FolderPublisher(config.folder / WEIGHTS) if served is None else served.publisher,
        evaluator=evaluator,
        status=lambda: source.stats().identity(),
    )


def make_pipeline_source(config: RunConfig) -> PipelineBatchSource:
    return PipelineBatchSource(
        redis_url(config.pipeline),
        config.queue_key,
        config.rollouts.rollouts_per_update,
        max_lag=config.max_lag,
        acknowledge=config.pipeline.acknowledge,
    )


def begin(config: RunConfig, parts: TrainingParts, loaded: LoadedModel, start: ResumePoint, *, resume: bool) -> None:
    """Before the first batch: an empty queue for a new run, and weights that actors can begin with."""
    if not resume:
        asyncio.run(clear_queue(config))
    if not start.first_step:  # a trainer that is resumed publishes its own version
        parts.publisher.publish(dict(dense_parameters(loaded.model)), version=0)


async def clear_queue(config: RunConfig) -> None:
    """It may hold what is left of another run of the same name."""
    async with ExperienceQueue(redis_url(config.pipeline), config.queue_key) as queue:
        await queue.clear()


# --- who answers in an evaluation ------------------------------------------------------------------------------


def _served(config: RunConfig, loaded: LoadedModel) -> ServedPolicy | None:
    if config.samples_on_vllm:
        return _on_servers(config)
    return _in_this_process(config, loaded) if config.eval.is_on else None


def _on_servers(config: RunConfig) -> ServedPolicy:
    """The servers that actors use, too."""
    from ludic.distributed import create_vllm_publisher
    from ludic.run.vllm import client_of, served_name, wait_for_servers

    servers = required_servers(config.rollouts.server)
    wait_for_servers(servers)
    client = client_of(config.rollouts, servers, config.folder)
    return ServedPolicy(
        client=client,
        publisher=create_vllm_publisher(client, wait_s=_SERVER_AWAY_S),
        close=lambda: asyncio.run(client.close()),
        model=asyncio.run(served_name(client)),
    )


def _in_this_process(config: RunConfig, loaded: LoadedModel) -> ServedPolicy:
    engine = local_engine(loaded, max_length=config.train.max_seq_len)
    return ServedPolicy(
        client=engine,
        publisher=FolderAndEngine(FolderPublisher(config.folder / WEIGHTS), engine),
        snapshot=partial(EngineSnapshot, engine),
        close=engine.close,
        model=loaded.name,
    )


class FolderAndEngine:
    """Weights to a folder; the engine that evaluates has them already, and begins a new version.

    Not in place as for an engine that samples: this one stands still whenever the weights change, since training waits for
    an evaluation, or evaluates a copy.
    """

    def __init__(self, folder: FolderPublisher, engine: LocalEngine) -> None:
        self._folder = folder
        self._engine = engine

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._engine.new_version(version)
        self._folder.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        return self._folder.is_current(version)
