"""The likely cause of a run that learns nothing, from its metrics: for the terminal, while it runs and after, and the viewer."""

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

logger = logging.getLogger(__name__)

_COLLAPSED = 0.1
"""Share of the first update's entropy below which replies hardly vary."""
_FEW_ALIKE = 0.2
"""Share of groups of equal replies up to which replies are said to differ."""
_PATIENCE = 3
"""Updates in a row after which `LearningWatch` speaks."""


class LearningWatch:
    """Warns once of each likely cause while a run trains that it learns nothing, or that no reply is read."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []
        """The first update and the last ones."""
        self._best = -math.inf
        """Highest mean reward of an update."""
        self._advice = set[str]()
        """Last sentence of each warning, which has no numbers."""

    def note(self, row: Mapping[str, Any]) -> None:
        """One update's metrics, under their full names."""
        self._rows = [*self._rows[:1], *self._rows[1:][1 - _PATIENCE :], row]
        self._best = max(self._best, _reward(row))
        last, is_idle = self._rows[-_PATIENCE:], row.get("train/grad_norm") == 0
        if is_idle and _is_solved(self._rows[0], row, self._best):
            return
        cause = _collapse(self._rows) if is_idle else None
        if cause is None and len(last) == _PATIENCE:
            cause = _unread(last) or (likely_cause(last, self._rows) if _always(last, "grad_norm", 0) else None)
        if cause is not None and (advice := cause.rpartition(". ")[2]) not in self._advice:
            self._advice.add(advice)
            logger.warning("%s", f"Nothing is being learned. {cause}" if is_idle else cause)


def why_nothing_was_learned(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A message with the likely cause if most of a finished run's logged updates had no gradient and the tasks are not solved, or
    no reply was ever read; else None."""
    updates = [row for row in rows if row.get("train/grad_norm") is not None]
    idle = [row for row in updates if row["train/grad_norm"] == 0]
    if 2 * len(idle) <= len(updates):
        return _unread(updates)
    if len(idle) < len(updates) and _is_solved(updates[0], updates[-1], max(map(_reward, updates))):
        return None
    if len(idle) == len(updates):
        what = f"Nothing was learned: the gradient was zero in every update ({len(idle)})."
    else:
        what = f"Little was learned: the gradient was zero in {len(idle)} of {len(updates)} updates."
    return f"{what} {_unread(updates) or likely_cause(idle, updates)}"


def _is_solved(first: Mapping[str, Any], last: Mapping[str, Any], best: float) -> bool:
    """True if all episodes of the last update earned the best reward so far, and more than those of the first."""
    return last.get("train/total_reward_std") == 0 and best <= _reward(last) > _reward(first)


def _reward(row: Mapping[str, Any]) -> float:
    value = row.get("train/avg_total_reward")
    return -math.inf if value is None else float(value)


def _always(rows: Sequence[Mapping[str, Any]], name: str, value: float) -> bool:
    return bool(rows) and all(row.get(f"train/{name}") == value for row in rows)


_COMPARE = "Compare --parser, and the format that the prompt asks for, with the replies in the run's rollouts."


def _unread(rows: Sequence[Mapping[str, Any]], least: float = 1.0) -> str | None:
    """The cause, if this share of the episodes of these updates, and most, had replies that were not read: the parser, if most had
    such that were not cut off."""
    unread, unreadable = _mean(rows, "parse_error_rate", 0.0), _mean(rows, "unreadable_rate", 1.0)
    if unread < least or unread <= 0.5:
        return None
    who = "Every episode" if unread == 1 else "Most episodes"
    if unreadable > 0.5:
        return f"{who} had replies that the parser could not read. {_COMPARE}"
    also = f"In {unreadable:.0%} were replies that the parser could not read. {_COMPARE} " if unreadable else ""
    return (
        f"{who} had replies that ran out of tokens before they ended, and no action was read from them. {also}Give more "
        "with --max-tokens, or, where they are rejected unread, read them as they are with --cut-off read."
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str, unknown: float) -> float:
    values = [row.get(f"train/{name}") for row in rows]
    return fmean(unknown if value is None else value for value in values) if values else unknown


def _collapse(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The cause, if the last entropy is a small part of the first."""
    known = [entropy for row in rows if (entropy := row.get("train/entropy")) is not None]
    if not known or known[-1] >= _COLLAPSED * known[0]:
        return None
    return (
        f"Entropy has collapsed from {known[0]:.3g} to {known[-1]:.2g} nats per token, so replies to one task are all alike. If "
        "the task is not solved, the learning rate is too high: start again with a smaller --lr, or hold the policy with "
        "--kl-coeff."
    )


def likely_cause(idle: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]) -> str:
    """The first cause that explains every update without a gradient; earlier ones hide later ones."""
    if found := _collapse(updates) or _unread(idle, least=0.5):
        return found
    if _always(idle, "same_reply_rate", 1):
        return "All replies to one task were the same, so none was better than another. Raise --temperature."
    if _always(idle, "total_reward_std", 0):
        rewards = {row.get("train/avg_total_reward") for row in idle}
        how_much = f", {next(iter(rewards)):g}" if len(rewards) == 1 and None not in rewards else " within each update"
        return (
            f"All episodes earned the same reward{how_much}, so none was better than another. Look at the env's reward, or make "
            "the task easier until some episodes succeed."
        )
    if _always(idle, "zero_weight_rate", 1):
        what, advice = (
            "Rewards differed between tasks, but never between the rollouts of one task",
            "Raise --group-size",
        )
        if _mean(idle, "same_reply_rate", 1.0) <= _FEW_ALIKE:
            what += ", whose replies differed: the reward seems to ignore the reply (ludic show RUN --task TASK)"
            advice = "If it does not, raise --group-size"
        return f"{what}. {advice} or --temperature, or choose tasks that are neither too easy nor too hard."
    return "Weights were not zero, so the loss dropped every sample: look at clipping, corrections and masks in metrics.jsonl."
