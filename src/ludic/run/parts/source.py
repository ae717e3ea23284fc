"""The batch source of a run that plays its own episodes: the tasks of its envs, and the opponents.

Loads without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ludic import registry
from ludic.batch_gen import (
    DynamicSampling,
    IdentityStrategy,
    OfflineBatchSource,
    RequestsFn,
    RequestStrategy,
    RolloutBatchSource,
)
from ludic.batch_gen.requests.dataset import WeightedPart, WeightedRequests
from ludic.batch_gen.sources.rollouts import TrainedSeat
from ludic.batch_gen.sources.stragglers import Stragglers
from ludic.inference import ChatTemplate
from ludic.run.features.core import features_on
from ludic.run.features.curriculum import make_curriculum
from ludic.run.features.league import CURRENT, one_policy_seatings
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import EpisodeSetup
from ludic.run.parts.requests import request_strategy, seated_requests, train_requests
from ludic.run.resolve import ResolvedRun
from ludic.seeds import BatchSeeds
from ludic.types import (
    BatchSource,
    ConfigError,
    SampleFilter,
    SAWItem,
    derive_seed,
)

if TYPE_CHECKING:
    from ludic.inference.local.snapshot import League
    from ludic.training import RLAlgorithm


def make_source(
    run: ResolvedRun,
    setup: EpisodeSetup,
    algorithm: RLAlgorithm,
    *,
    jsonl_path: Path | None,
    league: League | None = None,
    spans_by: ChatTemplate | None = None,
) -> BatchSource:
    """Fresh rollouts by the engine of this run, or the stored ones of the settings. `spans_by` finds the message of each token of
    stored ones that do not say it."""
    rollouts = run.config.rollouts
    if rollouts.rollouts:
        return OfflineBatchSource(
            rollouts.rollouts,
            algorithm=algorithm,
            batch_size=rollouts.rollouts_per_update,
            chunk_rollouts=max(64, rollouts.rollouts_per_update),
            group_size=run.group_size if run.group_size > 1 else None,
            sample_filter=make_filter(run),
            seed=run.seed,
            spans_by=spans_by,
        )
    curriculum = make_curriculum(run, algorithm)
    requests: RequestsFn | None = None
    strategy: RequestStrategy = request_strategy(run, run.seed)
    if run.envs:
        requests, strategy = _requests_of_several(run, setup), IdentityStrategy()
    elif league is not None:
        requests = seated_requests(run, setup, one_policy_seatings(run))
    elif curriculum is None:
        requests = train_requests(run, setup)
    return RolloutBatchSource(
        setup.engine(jsonl_path=jsonl_path, seed=run.seed, max_failed_share=rollouts.max_failed_share),
        requests_fn=requests,
        curriculum=curriculum,
        strategy=strategy,
        algorithm=algorithm,
        max_steps=run.max_steps,
        concurrency=rollouts.concurrency or setup.concurrency,
        sample_filter=make_filter(run),
        dynamic_sampling=DynamicSampling(
            max_rounds=rollouts.dynamic_sampling, by_component=algorithm.compares_components
        )
        if rollouts.dynamic_sampling
        else None,
        stragglers=_stragglers(run),
        seat=None if league is None else TrainedSeat(CURRENT, (league,)),
    )


def _stragglers(run: ResolvedRun) -> Stragglers | None:
    """A group is carried into as many batches as make `max_lag` versions."""
    close_at = run.config.rollouts.close_batch_at
    carries = run.max_lag // run.trainer.steps_per_batch
    return Stragglers(close_at=close_at, max_carries=carries) if close_at < 1 else None


def _requests_of_several(run: ResolvedRun, setup: EpisodeSetup) -> WeightedRequests:
    """Groups of all envs in proportion to their shares; each request says which env it is of."""
    parts = []
    for index, (env, own) in enumerate(zip(run.envs, (setup, *setup.others), strict=True)):
        seed = derive_seed(run.seed, BatchSeeds.ENVS, index)
        facts = {"domain": env.name} | ({"objective": env.name} if run.has_own_algorithms else {})
        requests_fn = train_requests(env.run, own, seed, num_groups=1)
        parts.append(
            WeightedPart(
                requests_fn=requests_fn, weight=env.share, strategy=request_strategy(env.run, seed), facts=facts
            )
        )
    return WeightedRequests(parts, num_episodes=run.config.rollouts.rollouts_per_update)


def check_source(run: ResolvedRun) -> None:
    """ConfigError for features, filters or a reference that cannot work, before weights are loaded."""
    algorithm = make_algorithm(run)
    make_filter(run)
    for feature in features_on(run.config, run.parts):
        feature.check(run)
    reference = run.config.algo.reference
    if reference is not None and not algorithm.loss.needs.reference:
        raise ConfigError(
            f"reference = {reference!r} is what kl_coeff holds the policy near; give --kl-coeff, such as 0.01."
        )


def make_filter(run: ResolvedRun) -> SampleFilter | None:
    """Keeps what every filter of the settings keeps; None if there is none."""
    filters: list[SampleFilter] = [registry.filters.make(name) for name in run.config.algo.filter]

    def keeps(item: SAWItem) -> bool:
        return all(each(item) for each in filters)

    return keeps if filters else None
