"""Statistics of a training step: those of losses, those of a batch, and how they are named.

A loss reports each stat as (sum, count), never as a mean: sums and counts add up to the same number however a batch was
split. Names get one of the prefixes train/, eval/, perf/, gateway/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from ludic.types import (
    ConfigError,
    Reducer,
    SAWItem,
    added,
    apply_reducers_to_records,
    component_means,
    default_reducers,
    result_rates,
    samples_by_session,
)

PREFIXES = ("train/", "eval/", "perf/", "gateway/")
Scalar: TypeAlias = float | torch.Tensor
"""A number, or a tensor with one element; it is fetched from its device only when it is read."""


# --- names ----------------------------------------------------------------------------------------------------


def _prefixed_name(name: str) -> str:
    """`eval_x` is eval/x; `gpu_x` and every `x_s` are under perf/; a name with a prefix keeps it; the rest is under train/."""
    if name.startswith(PREFIXES):
        return name
    if name.startswith(("reward/", "score/")):  # a user's name follows
        return f"train/{name}"
    if name.startswith("gpu_") or name.endswith("_s"):  # seconds, and things per second
        return f"perf/{name}"
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"train/{name}"


def prefixed(stats: Mapping[str, float]) -> dict[str, float]:
    """The stats under their full names."""
    named: dict[str, float] = {}
    for name, value in stats.items():
        full = _prefixed_name(name)
        if full in named:
            raise ConfigError(f"Two stats are called {full!r}; one of them came as {name!r}. Rename one.")
        named[full] = value
    return named


# --- what losses report ---------------------------------------------------------------------------------------


class MetricSums:
    """Adds up (sum, count) pairs and maxima over the micro-batches of a step, without waiting for the device."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[Scalar, Scalar]]] = {}
        self._maxima: dict[str, list[Scalar]] = {}

    def add(self, stats: Mapping[str, tuple[Scalar, Scalar]]) -> None:
        """One micro-batch's share of each mean."""
        for name, (total, count) in stats.items():
            self._pairs.setdefault(name, []).append((_scalar(name, total), _scalar(name, count)))

    def add_max(self, stats: Mapping[str, Scalar]) -> None:
        """Values of which the largest counts, such as a ratio's maximum."""
        for name, value in stats.items():
            self._maxima.setdefault(name, []).append(_scalar(name, value))

    def means(self) -> dict[str, float]:
        """Means and maxima, after one copy from the device. A mean over a count of zero has no value and is left out."""
        return self.totals().means()

    def totals(self) -> "Totals":
        """The sums themselves, as plain numbers."""
        both = self._pairs.keys() & self._maxima.keys()
        assert not both, f"{sorted(both)} were reported both as means and as maxima"
        pairs = [cell for name in self._pairs for pair in self._pairs[name] for cell in pair]
        maxima = [cell for name in self._maxima for cell in self._maxima[name]]
        values = iter(_on_host(pairs + maxima))
        totals = Totals()
        for name, reported in self._pairs.items():
            here = [(next(values), next(values)) for _ in reported]
            totals.sums[name] = sum(total for total, _ in here), sum(count for _, count in here)
        for name, cells in self._maxima.items():
            totals.maxima[name] = _largest([next(values) for _ in cells])
        return totals


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums and maxima that micro-batches have reported; those of several ranks can be added up again."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name → (sum, count)."""
    maxima: dict[str, float] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self.sums.items() if count != 0} | self.maxima


def merge(parts: Iterable[Totals]) -> Totals:
    """The totals of all."""
    whole = Totals()
    for part in parts:
        for name, (total, count) in part.sums.items():
            so_far, counted = whole.sums.get(name, (0.0, 0.0))
            whole.sums[name] = so_far + total, counted + count
        for name, value in part.maxima.items():
            whole.maxima[name] = _largest([whole.maxima.get(name, value), value])
    return whole


def _scalar(name: str, cell: Scalar) -> Scalar:
    if not isinstance(cell, torch.Tensor):
        return float(cell)
    assert cell.numel() == 1, f"the stat {name!r} must be one number, but has shape {tuple(cell.shape)}"
    # Counts of tokens are exact in float64, and sums of float32 lose nothing.
    return cell.detach().reshape(()).to(torch.float64)


def _on_host(cells: Sequence[Scalar]) -> list[float]:
    """The values in order; one copy for each device that holds some of them."""
    waiting: dict[torch.device, list[int]] = {}
    for index, cell in enumerate(cells):
        if isinstance(cell, torch.Tensor):
            waiting.setdefault(cell.device, []).append(index)
    fetched: dict[int, float] = {}
    for indices in waiting.values():
        stacked = torch.stack([torch.as_tensor(cells[index]) for index in indices])
        fetched.update(zip(indices, stacked.tolist(), strict=True))
    return [fetched[index] if index in fetched else float(cell) for index, cell in enumerate(cells)]


def _largest(values: Sequence[float]) -> float:
    return float(np.max(values))  # unlike max(), it does not lose a NaN


# --- what a batch tells about itself --------------------------------------------------------------------------


def batch_stats(
    items: Sequence[SAWItem], meta: Mapping[str, Any] | None = None, reducers: Mapping[str, Reducer] | None = None
) -> dict[str, float]:
    """Counts, lengths and rewards of the items that are trained on, and the numbers that their source gave in `meta`.

    Statistics of rollouts count each rollout once, however many items or threads of a session it became. An average in `meta`
    wins over that of the items: a source knows all that it generated, the items are what its filters left.
    """
    rollouts = samples_by_session(items)
    origins = [item.origin for item in items]
    rewards = [reward for own in rollouts if (reward := _total_reward(own)) is not None]
    stats = {
        "num_samples": float(len(items)),
        "num_rollouts": float(len(rollouts)),
        "num_tokens": float(sum(len(item.input_ids) for item in items)),
        "num_action_tokens": float(sum(item.num_action_tokens for item in items)),
    }
    averages = {
        "avg_completion_length": _mean(item.num_action_tokens for item in items),
        "avg_prompt_length": _mean(len(item.input_ids) - item.num_action_tokens for item in items),
        "zero_weight_rate": _mean(not item.token_weights.any() for item in items),
        "parse_error_rate": _mean(origin.parse_error for origin in origins if origin.parse_error is not None),
        "unreadable_rate": _mean(
            any((item.origin.num_parse_errors or 0) > item.origin.num_cut_off for item in own)
            for own in rollouts
            if any(item.origin.num_parse_errors is not None for item in own)
        ),
        "same_reply_rate": _same_reply_rate(rollouts),
        "avg_total_reward": _mean(rewards),
        "total_reward_std": float(np.std(rewards)) if rewards else None,
        "truncated_rate": _mean(any(map(_is_truncated, own)) for own in rollouts),
        "over_limit_rate": _mean(any(_is_truncated(i) or i.origin.num_cut_off > 0 for i in own) for own in rollouts),
        **result_rates([_result(own) for own in rollouts]),
        **_components(rollouts),
    }
    reduced = apply_reducers_to_records(
        [item.record() for item in items],
        default_reducers() if reducers is None else reducers,
        sample_count=len(items),
        rollout_count=len(rollouts),
    )
    known = {name: value for name, value in averages.items() if value is not None} | reduced | _numbers(meta or {})
    return {**known, **stats}


def _same_reply_rate(rollouts: Sequence[Sequence[SAWItem]]) -> float | None:
    """Share of groups whose rollouts all sampled the same tokens."""
    replies: dict[Any, list[tuple[bytes, ...]]] = {}
    for own in rollouts:
        if (group := own[0].origin.group) is not None:
            sampled = tuple(item.input_ids[item.action_mask].tobytes() for item in own)
            replies.setdefault(group, []).append(sampled)
    return _mean(len(set(each)) == 1 for each in replies.values() if len(each) > 1)


def _total_reward(items: Sequence[SAWItem]) -> float | None:
    """Total reward of a rollout and its threads; None if it is not known."""
    rewards = {item.origin.rollout_id: item.origin.total_reward for item in items}
    return None if None in rewards.values() else float(sum(filter(None, rewards.values())))


def _components(rollouts: Sequence[Sequence[SAWItem]]) -> dict[str, float]:
    """Mean components of the rollouts whose components are known."""
    origins = [list({item.origin.rollout_id: item.origin for item in own}.values()) for own in rollouts]
    known = [own for own in origins if all(origin.reward_components is not None for origin in own)]
    components = [added(origin.reward_components or {} for origin in own) for own in known]
    return component_means(
        components, [added(origin.scores or origin.reward_components or {} for origin in own) for own in known]
    )


def _is_truncated(item: SAWItem) -> bool:
    return item.origin.episode_truncated or item.origin.truncated


def _result(items: Sequence[SAWItem]) -> str | None:
    """The result of the rollout, if its env gives one in info["result"]."""
    said = [result for item in items if isinstance(result := item.meta.get("result"), str)]
    return said[-1] if said else None


def _numbers(meta: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in meta.items()
        if isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed) if listed else None
