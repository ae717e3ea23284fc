"""Computes the report of an evaluation from finished rollouts."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from ludic.eval.outcome import Outcome, outcomes_of, step_records
from ludic.eval.statistics import Estimate, check_k, majority_at_k, mean_estimate, pass_at_k, share_estimate
from ludic.types import ConfigError, Reducer, Rollout, apply_reducers_to_records, default_reducers, result_names
from ludic.types.steps import OWN_COMPONENTS

logger = logging.getLogger(__name__)

METRICS: dict[str, str] = {
    "accuracy": "share of right samples, averaged over tasks",
    "mean_reward": "the env's reward per episode, without format rewards",
    "mean_total_reward": "total reward per episode, with format rewards and scorers",
    "score/{component}": "mean score of each scorer before its weight, over the samples that have one",
    "pass@k": "at least one of k samples is right: 1 − C(n − c, k) / C(n, k) for c right of n, averaged over tasks",
    "majority@k": "the most frequent answer of k samples is right: exact, over all choices of k of the n samples",
    "win_rate": "share of all episodes with info['result'] = win; other results alike",
    "draw_rate": "see win_rate",
    "loss_rate": "see win_rate",
    "illegal_move_rate": "share of episodes with info['illegal_move']",
    "unreadable_rate": "share of samples with a complete reply that could not be read",
    "over_limit_rate": "share of samples that met a limit: turns, context, or the tokens of a reply ('truncated' in the table)",
    "parse_error_rate": "share of samples with a reply that was not read, complete or cut off",
    "truncation_rate": "share of samples that a limit ended",
    "completion_truncated_rate": "share of replies that max_tokens cut off",
    "failed_rate": "share of episodes that could not be finished",
    "num_failed": "their number",
    "num_tasks": "tasks",
    "num_samples": "episodes",
    "mean_turns": "turns per episode, of all its roles",
    "mean_completion_tokens": "sampled tokens per episode, of all its roles",
    "{role}/accuracy": "of one role, where several of an episode are evaluated; the numbers without a role are means over roles",
    "{role}/mean_reward": "mean reward of one role",
}
"""The meaning of each number of a report; `ludic parts metric` prints it. x_low and x_high are the ends of x's 95 % interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grading:
    """The grading of rollouts and the metrics that are computed."""

    success_reward: float | None = 1.0
    """An episode without info["correct"] is correct if its env reward is at least this; None: such episodes are not graded, for
    envs without a notion of success."""
    pass_k: Sequence[int] | None = None
    """Values of k for pass@k. None: the number of samples per task, if above 1."""
    majority_k: Sequence[int] | None = None
    """Values of k for majority@k. None: the same, for tasks of one turn."""

    def __post_init__(self) -> None:
        for name, ks in (("pass_k", self.pass_k), ("majority_k", self.majority_k)):
            if any(k < 1 for k in ks or ()):
                raise ConfigError(f"{name}={list(ks or ())}; every k must be at least 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """One evaluation."""

    outcomes: list[Outcome]
    """One per sample, or one per role of a sample."""
    records: list[dict[str, Any]]
    """One per reply to the env."""
    estimates: dict[str, Estimate]
    """accuracy, mean_reward, pass@k, majority@k, rates of results, with intervals."""
    metrics: dict[str, float]
    """All numbers, flat; an estimate x appears as x, x_low and x_high."""


def make_report(
    rollouts: Sequence[Rollout], grading: Grading | None = None, reducers: Mapping[str, Reducer] | None = None
) -> EvalReport:
    """The report of these rollouts; `reducers` add metrics over the records."""
    grading = grading or Grading()
    outcomes = outcomes_of(rollouts, success_reward=grading.success_reward)
    if not outcomes:
        raise ConfigError("There is nothing to report: there are no rollouts. Ask for at least one task.")
    by_id = {outcome.rollout_id: outcome for outcome in outcomes}  # delegated sub-tasks have none, and no record
    records = [record for r in rollouts if r.id in by_id for record in step_records(r, by_id[r.id])]
    estimates = _estimates(outcomes, grading)
    chosen = {"completion_truncated_rate": default_reducers()["completion_truncated_rate"], **(reducers or {})}
    reduced = apply_reducers_to_records(records, chosen, sample_count=len(records), rollout_count=len(outcomes))
    metrics = {**_counts(outcomes), **_flat(estimates), **reduced}
    return EvalReport(outcomes=outcomes, records=records, estimates=estimates, metrics=metrics)


def by_task(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    tasks: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        tasks[outcome.task].append(outcome)
    return dict(tasks)


def _has_roles(outcomes: Sequence[Outcome]) -> bool:
    """True if an episode has several evaluated roles."""
    played = {(outcome.episode, outcome.role) for outcome in outcomes if outcome.role is not None}
    return len({episode for episode, _ in played}) < len(played)


def _counts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    has_roles = _has_roles(outcomes)
    keys = [o.episode if has_roles else o.rollout_id for o in outcomes]  # roles of one episode are one sample
    num_samples = len(set(keys))
    num_failed = len({key for key, o in zip(keys, outcomes, strict=True) if o.failure is not None})
    return {
        "num_tasks": float(len(by_task(outcomes))),
        "num_samples": float(num_samples),
        "num_failed": float(num_failed),
        "parse_error_rate": fmean(o.has_parse_error for o in outcomes),
        "unreadable_rate": fmean(o.has_unreadable_reply for o in outcomes),
        "truncation_rate": fmean(o.is_truncated for o in outcomes),
        "over_limit_rate": fmean(o.is_truncated or o.has_cut_off_reply for o in outcomes),
        "failed_rate": num_failed / num_samples,
        "mean_total_reward": fmean(o.total_reward for o in outcomes),
        "mean_turns": sum(o.num_turns for o in outcomes) / num_samples,
        "mean_completion_tokens": sum(o.num_completion_tokens for o in outcomes) / num_samples,
    }


def _estimates(outcomes: Sequence[Outcome], grading: Grading) -> dict[str, Estimate]:
    tasks = by_task(outcomes)
    found: dict[str, Estimate] = {}
    is_graded = outcomes[0].correct is not None
    if is_graded:
        found["accuracy"] = _share(tasks, lambda o: bool(o.correct))
    found["mean_reward"] = mean_estimate([fmean(o.reward for o in samples) for samples in tasks.values()])
    has_roles = _has_roles(outcomes)
    if has_roles:
        found |= _by_role(outcomes, is_graded=is_graded)
    found |= _scores(tasks)
    for name, holds in _result_rates(outcomes).items():
        found[name] = _share(tasks, holds)
    if has_roles:
        if grading.pass_k or grading.majority_k:
            logger.warning(
                "pass@k and majority@k are left out: several roles of an episode are evaluated, not attempts at a task."
            )
    elif is_graded:
        found |= {f"pass@{k}": _pass_at(tasks, k) for k in _ks(grading.pass_k, tasks)}
        # A vote needs one answer per sample, not the last move of a game.
        has_answers = all(o.num_turns <= 1 for o in outcomes)
        voted = _ks(grading.majority_k, tasks) if has_answers or grading.majority_k is not None else []
        found |= {f"majority@{k}": _majority_at(tasks, k) for k in voted}
    elif grading.pass_k or grading.majority_k:
        raise ConfigError(
            "pass@k and majority@k need graded samples, but this env does not set info['correct']. Set success_reward: the "
            "smallest env reward of a correct episode."
        )
    return found


def _by_role(outcomes: Sequence[Outcome], *, is_graded: bool) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    for role in sorted({outcome.role for outcome in outcomes if outcome.role is not None}):
        # An episode that failed before it had roles counts for each.
        tasks = by_task([outcome for outcome in outcomes if outcome.role in (role, None)])
        if is_graded:
            found[f"{role}/accuracy"] = _share(tasks, lambda o: bool(o.correct))
        found[f"{role}/mean_reward"] = mean_estimate([fmean(o.reward for o in samples) for samples in tasks.values()])
    return found


def _scores(tasks: Mapping[str, Sequence[Outcome]]) -> dict[str, Estimate]:
    """`score/{component}` of each component that a scorer added, before its weight, over the samples that have one."""
    names = {
        name: None for samples in tasks.values() for o in samples for name in o.scores if name not in OWN_COMPONENTS
    }
    by_name = {name: [[o.scores[name] for o in t if name in o.scores] for t in tasks.values()] for name in names}
    return {f"score/{name}": mean_estimate([fmean(own) for own in by_name[name] if own]) for name in names}


def _ks(asked: Sequence[int] | None, tasks: Mapping[str, Sequence[Outcome]]) -> Sequence[int]:
    fewest = min(map(len, tasks.values()))
    if asked is not None:
        for k in asked:
            check_k(k, fewest)
        return asked
    return [fewest] if fewest > 1 else []


def _result_rates(outcomes: Sequence[Outcome]) -> dict[str, Callable[[Outcome], bool]]:
    """Rates of game results, if the env reports them, as shares of all samples, including unfinished games."""
    names = result_names([o.result for o in outcomes])
    rates: dict[str, Callable[[Outcome], bool]] = {f"{name}_rate": partial(_has_result, name) for name in names}
    if any(o.illegal_move is not None for o in outcomes):
        rates["illegal_move_rate"] = lambda o: bool(o.illegal_move)
    return rates


def _has_result(name: str, outcome: Outcome) -> bool:
    return outcome.result == name


def _share(tasks: Mapping[str, Sequence[Outcome]], holds: Callable[[Outcome], bool]) -> Estimate:
    num_samples = sum(map(len, tasks.values()))
    return share_estimate([fmean(map(holds, samples)) for samples in tasks.values()], num_samples=num_samples)


def _pass_at(tasks: Mapping[str, Sequence[Outcome]], k: int) -> Estimate:
    return share_estimate([pass_at_k(len(t), sum(bool(o.correct) for o in t), k) for t in tasks.values()])


def _majority_at(tasks: Mapping[str, Sequence[Outcome]], k: int) -> Estimate:
    return share_estimate(
        [majority_at_k([o.answer for o in t], [bool(o.correct) for o in t], k) for t in tasks.values()]
    )


def _flat(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Estimates as flat numbers, without infinite bounds."""
    flat: dict[str, float] = {}
    for name, estimate in estimates.items():
        flat[name] = estimate.mean
        if math.isfinite(estimate.low) and math.isfinite(estimate.high):
            flat |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return flat


def paired_difference(before: Sequence[Outcome], after: Sequence[Outcome]) -> Estimate:
    """Mean difference (after − before) in accuracy, or in reward if ungraded, over the tasks of both evaluations.

    Paired differences vary less than the tasks, so this is more sensitive than comparing two intervals.
    """
    old, new = by_task(before), by_task(after)
    shared = [task for task in old if task in new]
    if not shared:
        raise ConfigError("These two evaluations have no task in common; give them the same tasks and seeds.")
    is_graded = before[0].correct is not None and after[0].correct is not None

    def score(samples: Sequence[Outcome]) -> float:
        return fmean(bool(o.correct) if is_graded else o.reward for o in samples)

    return mean_estimate([score(new[task]) - score(old[task]) for task in shared])
