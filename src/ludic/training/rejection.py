"""Rejection: which samples are good enough to be imitated. Preprocess hooks; the batch that they are given stays as it was."""

from typing import Any

from ludic.types import ConfigError, SAWBatch, SAWItem


def keep_rewarded(batch: SAWBatch, *, min_reward: float = 1.0) -> SAWBatch:
    """The samples of rollouts that earned `min_reward` in total; their share is in meta["accepted_frac"]."""
    kept = [item for item in batch.items if _total_reward(item) >= min_reward]
    share = len(kept) / len(batch.items) if batch.items else 0.0
    return SAWBatch(items=kept, meta={**batch.meta, "accepted_frac": share})


def keep_distinct(batch: SAWBatch) -> SAWBatch:
    """The batch with each token sequence once; the share left out is in meta["duplicate_frac"]."""
    first: dict[bytes, SAWItem] = {}
    for item in batch.items:
        first.setdefault(item.input_ids.tobytes(), item)
    share = 1 - len(first) / len(batch.items) if batch.items else 0.0
    return SAWBatch(items=list(first.values()), meta={**batch.meta, "duplicate_frac": share})


def keep_few_per_group(batch: SAWBatch, *, max_rollouts: int) -> SAWBatch:
    """At most so many rollouts of each group, those that earned most: prompts that are easy do not outweigh the others.

    Of equal ones the first are kept. Samples without a group pass.
    """
    if max_rollouts < 1:
        raise ConfigError(f"max_rollouts={max_rollouts}; a group without any could be left out by min_reward.")
    rewards: dict[Any, dict[Any, float]] = {}
    for item in batch.items:
        rewards.setdefault(item.meta.get("group_id"), {})[_rollout(item)] = _total_reward(item)
    chosen = {
        rollout
        for group, earned in rewards.items()
        for place, rollout in enumerate(sorted(earned, key=lambda rollout: -earned[rollout]))
        if group is None or place < max_rollouts
    }
    return SAWBatch(items=[item for item in batch.items if _rollout(item) in chosen], meta=dict(batch.meta))


def _rollout(item: SAWItem) -> Any:
    """Samples that do not name a rollout are rollouts of their own."""
    return item.meta.get("rollout_id", id(item))


def _total_reward(item: SAWItem) -> float:
    reward = item.meta.get("total_reward")
    if reward is None:
        raise ConfigError(
            "A sample does not say what its rollout earned (meta['total_reward']), so it cannot be accepted or rejected. "
            "Items that Ludic makes from rollouts say it; write it into your own, or use make_sft for demonstrations."
        )
    return float(reward)
