"""Builds a batch from finished episodes: drops failed groups, assigns credit, stitches, filters, counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from ludic.batch_gen.episodes import Episode
from ludic.batch_gen.stitching import stitch_rollout
from ludic.types import (
    ConfigError,
    CreditAssigner,
    Rollout,
    SampleFilter,
    SAWBatch,
    SAWItem,
    added,
    by_session,
    component_means,
)

GATEWAY_KINDS = ("healed", "rerendered", "forked", "foreign", "retried", "undelivered", "failed", "limited")
"""Calls of an agent's session that are not plainly continued; each has a metric."""


class HasCreditAssigner(Protocol):
    """The part of an algorithm that batch generation needs."""

    @property
    def credit_assigner(self) -> CreditAssigner: ...


def credit_of(credit_assigner: CreditAssigner | None, algorithm: HasCreditAssigner | None) -> CreditAssigner:
    """The given assigner, or that of the algorithm."""
    if (credit_assigner is None) == (algorithm is None):
        raise ConfigError(
            "Give either credit_assigner=… or algorithm=… (whose credit_assigner is used); "
            f"{'both' if algorithm is not None else 'neither'} was given."
        )
    if algorithm is not None:
        return algorithm.credit_assigner
    assert credit_assigner is not None, "one of the two is given"
    return credit_assigner


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptEpisodes:
    """The episodes that get credit, and counts of the dropped ones."""

    episodes: list[Episode]
    """In order; every group is complete."""
    num_failed: int
    num_unscored: int
    """Failed episodes that a scorer failed."""
    num_groups_dropped: int
    num_retried: int

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for episode in self.episodes for rollout in episode.rollouts if rollout.failure is None]

    def played_by(self, policy: str) -> "_KeptEpisodes":
        """The same episodes with only this policy's rollouts."""
        return replace(
            self,
            episodes=[replace(e, rollouts=[r for r in e.rollouts if r.policy == policy]) for e in self.episodes],
        )


def _drop_failed_groups(episodes: Sequence[Episode]) -> _KeptEpisodes:
    """Drop failed episodes and the groups they belong to."""
    failed = [episode for episode in episodes if episode.failure is not None]
    broken = {episode.plan.group_id for episode in failed} - {None}
    return _KeptEpisodes(
        episodes=[e for e in episodes if e.failure is None and e.plan.group_id not in broken],
        num_failed=len(failed),
        num_unscored=sum(episode.failure is not None and episode.failure.by_scorer for episode in failed),
        num_groups_dropped=len(broken),
        num_retried=sum(episode.num_attempts > 1 for episode in episodes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBuilder:
    """Turns episodes into items."""

    credit_assigner: CreditAssigner
    sample_filter: SampleFilter | None = None
    """True keeps an item."""
    per_turn: bool = False
    """One item for each turn, also where turns continue token for token."""

    def batch(self, episodes: Sequence[Episode], *, policy: str | None = None) -> SAWBatch:
        """`policy`: build items only from this policy's rollouts; failures of any policy drop the episode or group."""
        settled = _drop_failed_groups(episodes) if policy is None else _drop_failed_groups(episodes).played_by(policy)
        rollouts = settled.rollouts
        weights = self.credit_assigner.compute(rollouts) if rollouts else {}
        items = [
            item
            for episode in settled.episodes
            for rollout in episode.rollouts
            for item in stitch_rollout(
                rollout, weights, per_turn=self.per_turn, require_logprobs=_asked_for_logprobs(episode)
            )
        ]
        kept = items if self.sample_filter is None else [item for item in items if self.sample_filter(item)]
        return SAWBatch(items=kept, meta=_meta(episodes, settled, items, kept))


def _asked_for_logprobs(episode: Episode) -> bool:
    inference = episode.plan.request.inference
    return inference is not None and inference.return_.return_chosen_logprobs


def _meta(
    episodes: Sequence[Episode], settled: _KeptEpisodes, items: Sequence[SAWItem], kept: Sequence[SAWItem]
) -> dict[str, Any]:
    sessions = by_session(settled.rollouts)  # a thread counts for its session
    counts = {
        "target_rollouts": len(episodes),
        "num_samples_before_filter": len(items),
        "num_samples": len(kept),
        "num_samples_filtered": len(items) - len(kept),
        "num_rollouts": len(sessions),
        "num_rollouts_without_samples": len({r.id for r in settled.rollouts} - {i.origin.rollout_id for i in items}),
        "num_failed": settled.num_failed,
        "num_unscored": settled.num_unscored,
        "num_retried": settled.num_retried,
        "num_groups_dropped": settled.num_groups_dropped,
    }
    averages = {
        "avg_total_reward": _mean([sum(rollout.total_reward for rollout in session) for session in sessions]),
        "avg_completion_length": _mean([item.num_action_tokens for item in kept]),
        "avg_prompt_length": _mean([len(item.input_ids) - item.num_action_tokens for item in kept]),
        "avg_turns": _mean([sum(map(_num_turns, session)) for session in sessions]),
    }
    averages |= _call_rates(settled.rollouts) | _rates_by_domain(sessions)
    averages |= component_means(
        [added(rollout.reward_components for rollout in session) for session in sessions],
        [added(rollout.scores for rollout in session) for session in sessions],
    )
    metrics = {name: float(value) for name, value in {**counts, **averages}.items()}
    unscored = [e.failure for e in episodes if e.failure is not None and e.failure.by_scorer]
    because = {"unscored_because": unscored[0].summary_and_place} if unscored else {}
    return {**counts, **averages, **because, "rollout_metrics": metrics}


def _rates_by_domain(sessions: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Episodes and mean reward of each domain that requests name; empty where they name none."""
    rewards: dict[str, list[float]] = {}
    for session in sessions:
        if (domain := session[0].domain) is not None:
            rewards.setdefault(domain, []).append(sum(rollout.total_reward for rollout in session))
    counts = {f"{name}/num_rollouts": float(len(own)) for name, own in rewards.items()}
    return counts | {f"{name}/avg_total_reward": fmean(own) for name, own in rewards.items()}


def _call_rates(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of gateway sessions: calls per session, the share of calls of each kind, and of sessions whose agent raised."""
    sessions = [rollout.call_counts for rollout in rollouts if rollout.call_counts]
    totals = sum(map(Counter, sessions), Counter[str]())
    num_calls = totals.pop("calls", 0)
    rates = {f"gateway/{kind}_rate": totals[kind] / num_calls for kind in GATEWAY_KINDS if num_calls}
    if totals["raised"]:
        rates["gateway/raised_rate"] = totals["raised"] / len(sessions)
    return {"gateway/calls": num_calls / len(sessions), **rates} if sessions else {}


def _num_turns(rollout: Rollout) -> int:
    """Turns in which the agent acted; other players' moves are left out."""
    acted = {step.id for step in [*rollout.agent_steps, *rollout.sampling_steps]}
    return sum(any(step.id in acted for step in turn.steps) for turn in rollout.turns())


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
