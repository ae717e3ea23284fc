"""`Loss`: the contract, and the padded way in.

A loss says what it wants beside log-probs, and turns action tokens into a scalar and statistics. `compute` is the same
loss on the logits of a padded batch, as the seeds describe it; the trainer uses it for losses that have nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from ludic.models.teacher_kl import VocabularyKL
from ludic.training.losses.tokens import ActionTokens, BatchFacts, Reduction, Stats, over_items, over_tokens
from ludic.types import ConfigError, spread_of

E = TypeVar("E", bound=StrEnum)


class Loss(ABC):
    """From action tokens to a scalar that is minimised."""

    needs_entropy: bool = False
    needs_reference: bool = False
    needs_old_logps: bool = True
    needs_values: bool = False
    needs_logits: bool = False
    """Whether it looks at `ActionTokens.padded`: whole logits, in memory at once."""
    teacher_kl: VocabularyKL | None = None
    """The KL to a teacher in this process that it wants of every token."""

    @abstractmethod
    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the loss, and its statistics."""

    def compute(self, logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a whole padded batch: logits [B, T, V] and the tensors of `collate_saw_items`."""
        tokens = tokens_from_logits(logits, batch, with_entropy=self.needs_entropy)
        loss, stats = self(tokens)
        means = {name: torch.as_tensor(total) / max(count, 1e-12) for name, (total, count) in stats.items()}
        return loss, {"loss": loss.detach(), **means}


class ForeignLoss(Loss):
    """A loss without this base class: an object with the seeds' `compute(logits, batch) -> (loss, stats)`, or a callable.

    `compute` is called on padded micro-batches; its result and its statistics count as means over their samples, so how a batch
    is cut matters unless it divides by the number of samples. It sees raw logits: `batch["inverse_temperature"]` says what
    sampling scaled them by.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.needs_entropy = getattr(loss, "needs_entropy", False)
        self.needs_reference = getattr(loss, "needs_reference", False)
        self.needs_old_logps = getattr(loss, "needs_old_logps", True)
        self.needs_values = getattr(loss, "needs_values", False)
        self.needs_logits = getattr(loss, "needs_logits", hasattr(loss, "compute"))
        self.teacher_kl = getattr(loss, "teacher_kl", None)

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
    at = batch["action_mask"].bool()
    if torch.equal(batch["token_weight"][at], tokens.weights):
        return batch
    return {
        **batch,
        "token_weight": batch["token_weight"].masked_scatter(at, tokens.weights),
        "weight": tokens.item_weights,
    }


def as_loss(loss: Any) -> Loss:
    """The loss itself, or one without our base class in a form that the rest of the library can ask what it needs."""
    if isinstance(loss, Loss):
        return loss
    if not callable(loss) and not hasattr(loss, "compute"):
        raise ConfigError(
            f"{type(loss).__name__} is no loss: it has neither compute(logits, batch) nor __call__(tokens), which return a "
            "scalar and statistics."
        )
    return ForeignLoss(loss)


def common_distillation(losses: Iterable[Loss]) -> VocabularyKL | None:
    """The KL to a teacher that the parts of a loss share; there is one teacher and one pass over its logits."""
    wanted = {loss.teacher_kl for loss in losses} - {None}
    if len(wanted) > 1:
        raise ConfigError(
            f"Parts of one loss want different KLs to the teacher: {sorted(map(str, wanted))}. Give them the same direction and "
            "top_k."
        )
    return wanted.pop() if wanted else None


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """log-softmax at one index of the last dimension, in fp32."""
    logits = logits.float()
    return logits.gather(-1, index[..., None])[..., 0] - logits.logsumexp(dim=-1)


def tokens_from_logits(logits: Tensor, batch: Mapping[str, Tensor], *, with_entropy: bool = False) -> ActionTokens:
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
    tokens = ActionTokens(
        logps=selective_log_softmax(chosen, ids[rows, columns + 1]),
        weights=weight,
        item_index=rows,
        num_items=ids.shape[0],
        facts=_facts(batch["weight"], rows.shape[0]),
        old_logps=_at_actions(batch, "actor_logps", rows, columns),
        ref_logps=_at_actions(batch, "ref_logps", rows, columns),
        entropy=entropy,
    )
    return tokens if tokens.old_logps is not None else _with_sample_logps(tokens, batch)


def _with_sample_logps(tokens: ActionTokens, batch: Mapping[str, Tensor]) -> ActionTokens:
    """Where only the sum over a sample is known: the difference is spread over its tokens, which leaves the sum exact."""
    if "old_logp_action" not in batch:
        return tokens
    current = tokens.logps.detach()
    difference_B = (batch["old_logp_action"] - tokens.item_sum(current)) / tokens.lengths
    return replace(tokens, old_logps=current + tokens.spread(difference_B))


def _at_actions(batch: Mapping[str, Tensor], key: str, rows: Tensor, columns: Tensor) -> Tensor | None:
    if key not in batch:
        return None
    if batch[key].shape != batch["input_ids"].shape:
        raise ValueError(f"{key} has shape {tuple(batch[key].shape)}, input_ids {tuple(batch['input_ids'].shape)}.")
    return batch[key][rows, columns + 1]


def _facts(weight_B: Tensor, num_tokens: int) -> BatchFacts:
    weight_B = weight_B.detach().double()  # in float32 the mean of equal weights can miss them
    return BatchFacts(
        num_items=weight_B.shape[0],
        num_tokens=num_tokens,
        weight_mean=float(weight_B.mean()),
        weight_std=spread_of(weight_B.cpu().numpy()),
    )


def chosen_reduction(
    length_normalize: bool, reduction: Reduction | str | None, constant_length: int | None
) -> Reduction:
    """`length_normalize` is the short form of the first two; `reduction` names any."""
    chosen = (
        named(Reduction, reduction, "reduction")
        if reduction is not None
        else (Reduction.SAMPLE_MEAN if length_normalize else Reduction.SAMPLE_SUM)
    )
    if chosen is Reduction.CONSTANT and (constant_length is None or constant_length < 1):
        raise ConfigError(
            f"reduction='constant' divides by a fixed length; give constant_length (got {constant_length}), for "
            "instance max_tokens."
        )
    if chosen is not Reduction.CONSTANT and constant_length is not None:
        raise ConfigError(
            f"constant_length={constant_length} is only used by reduction='constant', but the reduction is {chosen.value!r}."
        )
    return chosen


def named(kind: type[E], value: E | str, setting: str) -> E:
    """The member of an enum that a setting names."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{setting}={value!r}; there are {', '.join(member.value for member in kind)}.") from None


def require_not_negative(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value}; it must be 0 or more.")


def require_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}; it must be above 0.")


# Statistics that every policy-gradient loss reports.


def common_stats(tokens: ActionTokens) -> Stats:
    weights_B = tokens.item_weights
    return {
        "adv_mean": over_items(weights_B),
        "adv_abs_mean": over_items(weights_B.abs()),
        "logp_mean": over_tokens(tokens.logps),
        "avg_action_tokens": (tokens.logps.new_full((), tokens.logps.shape[0]), float(tokens.num_items)),
    }


# Weights centred and scaled by the whole batch before another loss sees them.


class BatchNormalized(Loss):
    """(A − batch mean) / batch standard deviation, over samples; then the inner loss."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss = as_loss(loss)
        self.needs_entropy, self.needs_reference = loss.needs_entropy, loss.needs_reference
        self.needs_old_logps, self.needs_values = loss.needs_old_logps, loss.needs_values
        self.teacher_kl, self.needs_logits = loss.teacher_kl, loss.needs_logits

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        return self.loss(tokens.center())
