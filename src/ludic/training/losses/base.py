"""`Loss`: what every loss implements, and the loss of a padded batch.

A loss says what it needs besides log-probs, and turns action tokens into a scalar and statistics. `compute` is the same loss
on the logits of a padded batch, as the seeds describe it; the trainer uses it for losses that have nothing else.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ludic.models.teacher_kl import VocabularyKL
from ludic.training.losses.tokens import ActionTokens, BatchFacts, ObservedTokens, Stats, sum_and_count
from ludic.types import ConfigError, spread_of

_E = TypeVar("_E", bound=StrEnum)
Bound: TypeAlias = float | Tensor
"""Distance from 1 that a ratio may have: one number for all tokens, or a tensor with one for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The inputs of a loss besides log-probs and weights. The trainer computes what is needed and nothing else."""

    old_logps: bool = True
    """Log-probs of the policy that sampled."""
    proximal: bool = False
    """Log-probs of the weights from before the batch's first update: the old policy of PPO, where another one sampled."""
    reference: bool = False
    """Log-probs of a frozen reference model."""
    entropy: bool = False
    values: bool = False
    """Values and returns of a critic."""
    observations: bool = False
    """Log-probs of observation tokens (`ActionTokens.observed`)."""
    logits: bool = False
    """`ActionTokens.padded`: all logits of a micro-batch in memory at once."""
    teacher_kl: VocabularyKL | None = None
    """The KL to a teacher in this process, at every token."""

    @classmethod
    def of_parts(cls, losses: Iterable["Loss"]) -> "Needs":
        """The needs of all of them. There is one teacher and one pass over its logits, so they share one KL."""
        parts = [loss.needs for loss in losses]
        kls = {part.teacher_kl for part in parts} - {None}
        if len(kls) > 1:
            raise ConfigError(
                f"Parts of one loss want different KLs to the teacher: {sorted(map(str, kls))}. Give them the same direction and "
                "top_k."
            )
        flags = [field.name for field in fields(cls) if field.name != "teacher_kl"]
        any_part = {name: any(getattr(part, name) for part in parts) for name in flags}
        return cls(**any_part, teacher_kl=kls.pop() if kls else None)


class Loss(ABC):
    """Turns action tokens into a scalar that is minimised."""

    needs: Needs = Needs()

    @abstractmethod
    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the loss, and its statistics."""

    def compute(self, logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a whole padded batch: logits [B, T, V] and the tensors of `collate_saw_items`."""
        loss, stats = self(
            tokens_from_logits(logits, batch, with_entropy=self.needs.entropy, with_observed=self.needs.observations)
        )
        means = {name: torch.as_tensor(total) / max(count, 1e-12) for name, (total, count) in stats.items()}
        return loss, {"loss": loss.detach(), **means}


class ForeignLoss(Loss):
    """A loss without this base class: an object with the seeds' `compute(logits, batch) -> (loss, stats)`, or a callable.

    `compute` is called on padded micro-batches; its result and its statistics count as means over their samples, so how a batch
    is split matters unless it divides by the number of samples. It sees raw logits: `batch["inverse_temperature"]` says what
    sampling scaled them by. `needs` is an attribute that it may have.
    """

    def __init__(self, loss: Any) -> None:
        needs: Needs = getattr(loss, "needs", Needs())
        self.loss, self.needs = loss, replace(needs, logits=needs.logits or hasattr(loss, "compute"))

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        if not hasattr(self.loss, "compute"):
            given: tuple[Tensor, Stats] = self.loss(tokens)
            return given
        if tokens.padded is None:
            raise KeyError(
                f"{type(self.loss).__name__}.compute needs whole logits, which the Trainer computes for it. Where only log-probs "
                "are known (Tinker), a loss needs `__call__(tokens)`."
            )
        logits, batch = tokens.padded
        loss, stats = self.loss.compute(logits, _with_weights(batch, tokens))
        share = tokens.num_items / max(tokens.facts.num_items, 1)
        count = float(tokens.num_items)
        means = {name: torch.as_tensor(value).detach().float() for name, value in stats.items() if name != "loss"}
        return loss * share, {name: (mean * count, count) for name, mean in means.items()}

    def compute(self, logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if not hasattr(self.loss, "compute"):
            return super().compute(logits, batch)
        given: tuple[Tensor, dict[str, Tensor]] = self.loss.compute(logits, batch)
        return given


def _with_weights(batch: Mapping[str, Tensor], tokens: ActionTokens) -> Mapping[str, Tensor]:
    """The batch with the tokens' weights, where a correction or a baseline has changed them."""
    mask = batch["action_mask"].bool()
    if torch.equal(batch["token_weight"][mask], tokens.weights):
        return batch
    token_weight = batch["token_weight"].masked_scatter(mask, tokens.weights)
    return {**batch, "token_weight": token_weight, "weight": tokens.item_weights}


def as_loss(loss: Any) -> Loss:
    """The loss itself; one without the base class as a `ForeignLoss`."""
    for name in ("entropy", "reference", "old_logps", "values", "logits"):
        if hasattr(loss, f"needs_{name}"):
            raise ConfigError(f"{type(loss).__name__}.needs_{name} is not read; set needs = Needs({name}=…) instead.")
    if isinstance(loss, Loss):
        return loss
    if not callable(loss) and not hasattr(loss, "compute"):
        raise ConfigError(
            f"{type(loss).__name__} is no loss: it has neither compute(logits, batch) nor __call__(tokens), which return a "
            "scalar and statistics."
        )
    return ForeignLoss(loss)


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """log-softmax at one index of the last dimension, in fp32."""
    logits = logits.float()
    return logits.gather(-1, index[..., None])[..., 0] - logits.logsumexp(dim=-1)


def tokens_from_logits(
    logits: Tensor, batch: Mapping[str, Tensor], *, with_entropy: bool = False, with_observed: bool = False
) -> ActionTokens:
    """The action tokens of a padded batch; logits at t predict token t + 1."""
    ids, mask = batch["input_ids"], batch["action_mask"]
    if ids.shape[1] < 2:
        raise ValueError(f"A sequence of {ids.shape[1]} tokens has nothing to predict; it needs at least 2.")
    rows, columns = mask[:, 1:].bool().nonzero(as_tuple=True)
    chosen = logits[rows, columns]
    if "inverse_temperature" in batch:
        chosen = chosen.float() * batch["inverse_temperature"][rows, None]
    weight = batch["token_weight"][rows, columns + 1] if "token_weight" in batch else batch["weight"][rows]
    entropy = None
    if with_entropy:
        log_probs = torch.log_softmax(chosen.float(), dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    weight_B = batch["weight"].detach().double()  # in float32 the mean of equal weights can miss them
    episodes = tuple(map(str, batch["episode"].tolist())) if "episode" in batch else ()
    episode_tokens: Counter[str] = Counter()
    for name, count in zip(episodes, mask[:, 1:].bool().sum(1).tolist() if episodes else (), strict=True):
        episode_tokens[name] += count
    observed = _observed(logits, batch) if with_observed else None
    facts = BatchFacts(
        num_items=ids.shape[0],
        num_tokens=rows.shape[0],
        num_observed=0 if observed is None else observed.logps.shape[0],
        num_episodes=len(episode_tokens),
        episode_tokens=episode_tokens,
        weight_mean=float(weight_B.mean()),
        weight_std=spread_of(weight_B.cpu().numpy()),
    )
    tokens = ActionTokens(
        logps=selective_log_softmax(chosen, ids[rows, columns + 1]),
        weights=weight,
        item_index=rows,
        num_items=ids.shape[0],
        facts=facts,
        old_logps=_at_actions(batch, "actor_logps", rows, columns),
        ref_logps=_at_actions(batch, "ref_logps", rows, columns),
        entropy=entropy,
        episodes=episodes,
        observed=observed,
    )
    if tokens.old_logps is not None or "old_logp_action" not in batch:
        return tokens
    # Only the sum over a sample is known: the difference is spread over its tokens, which leaves the sum exact.
    current = tokens.logps.detach()
    difference_B = (batch["old_logp_action"] - tokens.item_sum(current)) / tokens.lengths
    return replace(tokens, old_logps=current + tokens.spread(difference_B))


def _observed(logits: Tensor, batch: Mapping[str, Tensor]) -> ObservedTokens:
    """The tokens of `SAWItem.observation_mask`, on a padded batch."""
    ids, is_action = batch["input_ids"], batch["action_mask"].bool()
    is_observed = (is_action.cumsum(1) > 0) & ~is_action & batch["attention_mask"].bool()
    rows, columns = is_observed[:, 1:].nonzero(as_tuple=True)
    logps = selective_log_softmax(logits[rows, columns], ids[rows, columns + 1])
    return ObservedTokens(logps=logps, item_index=rows)


def _at_actions(batch: Mapping[str, Tensor], key: str, rows: Tensor, columns: Tensor) -> Tensor | None:
    if key not in batch:
        return None
    if batch[key].shape != batch["input_ids"].shape:
        raise ValueError(f"{key} has shape {tuple(batch[key].shape)}, input_ids {tuple(batch['input_ids'].shape)}.")
    return batch[key][rows, columns + 1]


def named(kind: type[_E], value: _E | str, setting: str) -> _E:
    """The member of an enum that a setting names."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{setting}={value!r}; there are {', '.join(member.value for member in kind)}.") from None


def require_not_negative(**values: Bound | None) -> None:
    for name, value in values.items():
        if isinstance(value, (int, float)) and value < 0:
            raise ConfigError(f"{name}={value}; it must be 0 or more.")


def require_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}; it must be above 0.")


def clipped(ratio: Tensor, low: Bound, high: Bound) -> Tensor:
    """The ratio, held within [1 − low, 1 + high]."""
    return ratio.clamp(min=1 - low).clamp(max=1 + high)


def capped(ratio: Tensor, cap: float | None) -> Tensor:
    return ratio if cap is None else ratio.clamp(max=cap)


def common_stats(tokens: ActionTokens) -> Stats:
    """Statistics that every policy-gradient loss reports."""
    weights_B = tokens.item_weights
    return {
        "adv_mean": sum_and_count(weights_B),
        "adv_abs_mean": sum_and_count(weights_B.abs()),
        "logp_mean": sum_and_count(tokens.logps),
        "avg_action_tokens": (tokens.logps.new_full((), tokens.logps.shape[0]), float(tokens.num_items)),
    }


class BatchNormalized(Loss):
    """The inner loss on (A − batch mean) / batch standard deviation, over samples."""

    def __init__(self, loss: Loss) -> None:
        self.loss = as_loss(loss)
        self.needs = self.loss.needs

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        return self.loss(tokens.center())
