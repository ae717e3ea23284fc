"""Replay: samples of earlier batches that are trained on again (section [replay])."""

from ludic.batch_gen.sources.mixed import ReplayBatchSource
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Around, Feature, because
from ludic.run.given import Parts
from ludic.run.resolve import ResolvedRun
from ludic.types import BatchSource, derive_seed

_SEEDS = 107


class Replay(Feature):
    """Samples of earlier batches in each new one."""

    name = "[replay]"
    excludes = because(
        "replay brings older samples by itself, and these bound the lag of new ones.", "max_lag", "close_batch_at"
    )

    def is_on(self, config: RunConfig, parts: Parts) -> bool:
        return bool(config.replay.replay)

    def wrap(self, run: ResolvedRun, source: BatchSource, around: Around) -> BatchSource:
        settings = run.config.replay
        return ReplayBatchSource(
            source,
            capacity=settings.replay_capacity,
            num_replayed=settings.replay,
            max_lag=settings.replay_max_lag,
            half_life=settings.replay_half_life,
            fresh_every=settings.replay_fresh_every,
            seed=derive_seed(run.seed, _SEEDS),
        )

    def says(self, run: ResolvedRun) -> list[str]:
        settings = run.config.replay
        return [
            f"Each batch has {settings.replay} samples of earlier ones, drawn from the last {settings.replay_capacity:,}."
        ]
