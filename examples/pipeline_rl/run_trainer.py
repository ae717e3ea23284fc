"""The trainer of a pipeline: takes groups from Redis, learns from them, publishes its weights, accounts for every item.

Shows: `PipelineBatchSource`, an off-policy algorithm, weights through a folder or to vLLM servers, resuming.
Needs: Redis (see README.md), run_actor.py beside it, here or on other machines.
Takes: three minutes for 60 updates of the tiny model with one actor, on two CPU cores that others used too.

    python examples/pipeline_rl/run_trainer.py
    python examples/pipeline_rl/run_trainer.py --resume --updates 120
"""
# ruff: noqa: T201 - a script prints

import asyncio
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from shared import GROUP_SIZE, MAX_LAG, MAX_LENGTH, Meeting, make_algorithm

from ludic.batch_gen.pipeline import ExperienceQueue, PipelineBatchSource, WireLimits
from ludic.distributed import FolderPublisher, create_vllm_publisher
from ludic.models.loading import LoadedModel, load_model
from ludic.models.lora import dense_parameters
from ludic.training import CheckpointConfig, JSONLLogger, PrintLogger, TeeLogger, Trainer, TrainerConfig
from ludic.types import ConfigError, LudicError, PolicyPublisher

SHOWN = ("avg_total_reward", "adv_abs_mean", "lag_mean", "ess", "fetch_s", "step_s")


@dataclass(frozen=True, kw_only=True)
class Settings(Meeting):
    """What is learned from, and for how long."""

    out: Path = Path("runs/pipeline_rl")
    """The run's folder: metrics.jsonl and checkpoints."""
    resume: bool = False
    """Go on with the run in --out; without it, what is in the queue from an earlier run is thrown away."""
    updates: int = 60
    groups_per_update: int = 16
    lr: float = 1e-3
    checkpoint_every: int = 10
    """Items are acknowledged when a checkpoint has them; until then they come again after a crash."""
    seed: int = 1


def main(settings: Settings) -> None:
    if not settings.resume and (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.out} already. Go on with --resume, or choose another --out.")
    loaded = load_model(settings.model, dtype=torch.float32, seed=settings.seed)
    publisher = make_publisher(settings)
    print(asyncio.run(train(settings, loaded, publisher)))


async def train(settings: Settings, loaded: LoadedModel, publisher: PolicyPublisher) -> str:
    """The account of all items, in the end."""
    if not settings.resume:
        async with ExperienceQueue(settings.redis, settings.queue) as queue:
            await queue.clear()
    async with make_source(settings, loaded) as source:
        trainer = make_trainer(settings, loaded, publisher, source)
        if not settings.resume:  # a resumed trainer has published already
            await asyncio.to_thread(publisher.publish, dict(dense_parameters(loaded.model)), trainer.step)
        await trainer.train(max(0, settings.updates - trainer.step))
    if trainer.stop.is_set:
        print(f"Stopped after update {trainer.step}. Go on with --resume --out {settings.out}")
    return source.stats().identity()


def make_source(settings: Settings, loaded: LoadedModel) -> PipelineBatchSource:
    return PipelineBatchSource(
        settings.redis,
        settings.queue,
        batch_size=settings.groups_per_update * GROUP_SIZE,
        max_lag=MAX_LAG,
        limits=WireLimits(max_tokens=MAX_LENGTH, vocab_size=loaded.model.config.vocab_size),
    )


def make_publisher(settings: Settings) -> PolicyPublisher:
    return create_vllm_publisher(settings.servers()) if settings.server else FolderPublisher(settings.weights)


def make_trainer(
    settings: Settings, loaded: LoadedModel, publisher: PolicyPublisher, source: PipelineBatchSource
) -> Trainer:
    return Trainer(
        model=loaded.model,
        algo=make_algorithm(),
        batch_source=source,
        cfg=TrainerConfig(
            lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, max_seq_len=MAX_LENGTH, seed=settings.seed
        ),
        publisher=publisher,
        checkpoint_config=CheckpointConfig(settings.out / "checkpoints", every_n_steps=settings.checkpoint_every),
        resume_from="latest" if settings.resume else None,
        train_logger=TeeLogger(
            JSONLLogger(settings.out / "metrics.jsonl"),
            PrintLogger(keys=SHOWN, status=lambda: source.stats().identity()),
        ),
        tokenizer=loaded.tokenizer,
    )


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"run_trainer: {mistake}")
