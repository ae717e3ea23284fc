"""Checks for mistakes that do not stop training but spoil what it learns, and the likely cause of a run that learns nothing.

The checks of the model, of the first batch and of the last updates only warn. Weights that are not finite, and a GPU without
memory, end the run.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ludic.distributed.ranks import Ranks
from ludic.models.lora import adapter_problem
from ludic.models.weights import FiniteCheck, not_finite
from ludic.training.config import TrainerConfig
from ludic.types import OutOfGPUMemory, SAWItem

logger = logging.getLogger(__name__)


def check_model(model: Any) -> list[str]:
    """Warn if training cannot have any effect."""
    found = []
    problem = adapter_problem(model)
    if problem is not None:
        found.append(f"The adapter is inactive: {problem}. Nothing would be learned.")
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        found.append("No parameter of the model requires a gradient. Nothing would be learned.")
    return _warn(found)


def require_finite(check: FiniteCheck, ranks: Ranks, what: str, advice: str) -> None:
    """NotFinite on every rank if a tensor of any of them holds NaN or infinity."""
    gathered = ranks.gather(check.names())
    names = ranks.broadcast(None if gathered is None else list(dict.fromkeys(n for own in gathered for n in own)))
    if names:
        raise not_finite(what, names, advice)


@contextmanager
def explained_memory(cfg: TrainerConfig) -> Iterator[None]:
    """OutOfGPUMemory, with what to change, instead of torch's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        use = ""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            own = torch.cuda.memory_reserved()
            sizes = [f"{size / 2**30:.1f} GiB" for size in (total, own, max(total - free - own, 0), free)]
            use = "Of {}, this process holds {}, others and CUDA {}; {} is free. ".format(*sizes)
        recompute = "" if cfg.gradient_checkpointing else ", set gradient_checkpointing, which recomputes activations"
        recompute += "" if cfg.offload_activations else ", set offload_activations, which keeps them in host memory"
        raise OutOfGPUMemory(
            f"The GPU ran out of memory while training. {use}Lower micro_token_budget (now {cfg.micro_token_budget:,} tokens in "
            f"one forward pass; the gradient stays the same){recompute}, or train an adapter (lora_rank). `ludic plan` says what "
            "fits."
        ) from error


def check_masks(items: Sequence[SAWItem], tokenizer: Any = None) -> list[str]:
    """Warn about action masks and weights that cannot be right, and log the first sample's actions."""
    num_tokens = sum(len(item.input_ids) for item in items)
    num_actions = sum(item.num_action_tokens for item in items)
    found = []
    if num_actions == num_tokens:
        found.append("Every token is an action token: prompts would be trained on too.")
    if not any(item.token_weights.any() for item in items):
        found.append("Every weight is zero: all rewards of each group are equal, or there are no rewards.")
    ids = items[0].input_ids[items[0].action_mask][:40].tolist()
    shown = repr(tokenizer.decode(ids)) if tokenizer is not None else str(ids)
    message = "first batch: %d samples, %d tokens, of which %d are actions; the first sample's actions: %s"
    logger.info(message, len(items), num_tokens, num_actions, shown)
    return _warn(found)


def check_parity(stats: Mapping[str, float], tolerance: float) -> list[str]:
    """Warn if the trainer's probabilities of the sampled tokens are not the sampler's."""
    difference = stats.get("logp_difference_abs")
    if difference is None or difference <= tolerance:
        return []
    return _warn(
        [
            f"Sampler and trainer disagree: on the first batch, before any update, log-probs differ by {difference:.3g} nats per "
            f"token on average (more than {tolerance:g}). Usual causes: another precision, dropout, a sampling "
            "temperature that the samples do not record, an adapter that only one of them has, or samples of another model. "
            "kl_actor_policy_q1 to _q4 show where in a sample they differ."
        ]
    )


_COLLAPSED = 0.1
"""Share of the first update's entropy below which replies hardly vary."""
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
            cause = _unread(last) or (_likely_cause(last, self._rows) if _always(last, "grad_norm", 0) else None)
        if cause is not None and (advice := cause.rpartition(". ")[2]) not in self._advice:
            self._advice.add(advice)
            _warn([f"Nothing is being learned. {cause}" if is_idle else cause])


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
    return f"{what} {_unread(updates) or _likely_cause(idle, updates)}"


def _is_solved(first: Mapping[str, Any], last: Mapping[str, Any], best: float) -> bool:
    """Whether all episodes of the last update earned the best reward so far, and more than those of the first."""
    return last.get("train/total_reward_std") == 0 and best <= _reward(last) > _reward(first)


def _reward(row: Mapping[str, Any]) -> float:
    value = row.get("train/avg_total_reward")
    return -math.inf if value is None else float(value)


def _always(rows: Sequence[Mapping[str, Any]], name: str, value: float) -> bool:
    return bool(rows) and all(row.get(f"train/{name}") == value for row in rows)


def _unread(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The cause, if every episode of these updates had replies that were not read."""
    if not _always(rows, "parse_error_rate", 1):
        return None
    if _always(rows, "unreadable_rate", 0):
        return (
            "Every episode had replies that ran out of tokens before they ended, and no action was read from them. Give more "
            "with --max-tokens, or, where they are rejected unread, read them as they are with --cut-off read."
        )
    return (
        "Every episode had replies that the parser could not read. Compare --parser, and the format that the prompt asks "
        "for, with the replies in the run's rollouts."
    )


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


def _likely_cause(idle: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]) -> str:
    """The first cause that explains every update without a gradient; earlier ones hide later ones."""
    if found := _collapse(updates) or _unread(idle):
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
        if _always(idle, "same_reply_rate", 0):
            what += ", whose replies differed: the reward seems to ignore the reply (ludic show RUN --task TASK)"
            advice = "If it does not, raise --group-size"
        return f"{what}. {advice} or --temperature, or choose tasks that are neither too easy nor too hard."
    return "Weights were not zero, so the loss dropped every sample: look at clipping, corrections and masks in metrics.jsonl."


def _warn(messages: list[str]) -> list[str]:
    for message in messages:
        logger.warning(message)
    return messages
