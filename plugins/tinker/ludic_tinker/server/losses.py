"""The losses of the Tinker protocol, by the losses of Ludic: a row is a sample, its targets are its action tokens, and the loss
is a plain sum over them.

`check_rows` refuses a request before anything is computed; `loss_of` is what the training pass differentiates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludic.training.losses import CISPOLoss, Loss, MaskedCausalLMCrossEntropyLoss, TokenClippedSurrogateLoss
from ludic.training.losses.clipped import clipped_objective
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, BatchFacts, Reduction, Stats
from ludic.types import ConfigError, FloatArray, TokenArray

TargetArray: TypeAlias = npt.NDArray[np.int64]
Settings: TypeAlias = Mapping[str, Tensor]
"""Settings of a request by name: one value, or one per target."""

_SUM = Reduction("sample_sum")
_WHOLE_BATCH = BatchFacts(num_items=1, num_tokens=1)
"""Divides a sum by one."""


# Letters: T tokens of a row, K targets of one position, P targets of all rows, B rows.
@dataclass(frozen=True, slots=True)
class Row:
    """One datum of a training request."""

    tokens: TokenArray
    """The model's input."""
    targets: TargetArray
    """[T] the token after each position, or [T, K] several candidates for it."""
    inputs: Mapping[str, FloatArray]
    """Inputs of the loss by name, in the shape of the targets."""


class _DROLoss(Loss):
    """−Σ (A ℓ − β/2 (ℓ − ℓ_old)²). It is here because no algorithm of Ludic uses it."""

    def __init__(self, beta: Tensor) -> None:
        self.beta = beta

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        distance_P = tokens.logps - tokens.require_old_logps("dro")
        terms_P = tokens.logps * tokens.weights - 0.5 * self.beta * distance_P.square()
        return -tokens.reduce_tokens(terms_P, _SUM), {}


class _GSPOTokenLoss(Loss):
    """GSPO with a value per token: the ratio is the geometric mean over the marked tokens of a row, and each token has the
    gradient of its own log-probability. It is here because the mark is Tinker's: all tokens of Ludic's GSPO count."""

    def __init__(self, mask_P: Tensor, low: Tensor, high: Tensor) -> None:
        self.is_marked_P, self.low, self.high = (mask_P != 0).float(), low, high

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        now_P = tokens.logps.detach()
        sums_B = tokens.item_sum((now_P - tokens.require_old_logps("gspo")) * self.is_marked_P)
        mean_B = sums_B / tokens.item_sum(self.is_marked_P).clamp(min=1)
        log_ratio_P = tokens.spread(mean_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + tokens.logps - now_P
        objective_P, _ = clipped_objective(log_ratio_P.exp(), tokens.weights, self.low, self.high)
        return -tokens.reduce_tokens(objective_P, _SUM), {}


@dataclass(frozen=True, slots=True)
class _LossRule:
    """One loss, and the inputs and settings that a request gives it."""

    make: Callable[[Settings], Loss]
    inputs: frozenset[str]
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Settings of the request (`loss_fn_config`). A clip threshold may also be given per target, as an input."""
    takes_several: bool = False
    """True if a position may have several targets."""


def _clip(settings: Settings) -> dict[str, Any]:
    """Tinker's thresholds of the ratio as the distances from 1 that Ludic's losses take."""
    low, high = (settings[name] for name in _BOUNDS)
    return {"clip_eps_low": 1 - low, "clip_eps_high": high - 1}


_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
_SAMPLED = frozenset({"logprobs", "advantages"})
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": _LossRule(
        lambda _: MaskedCausalLMCrossEntropyLoss(reduction=_SUM), frozenset({"weights"}), takes_several=True
    ),
    "importance_sampling": _LossRule(
        lambda _: TokenClippedSurrogateLoss(clip_eps_low=math.inf, clip_eps_high=math.inf, reduction=_SUM), _SAMPLED
    ),
    "ppo": _LossRule(lambda s: TokenClippedSurrogateLoss(**_clip(s), reduction=_SUM), _SAMPLED, _CLIP),
    "cispo": _LossRule(lambda s: CISPOLoss(**_clip(s), reduction=_SUM), _SAMPLED, _CLIP),
    "gspo": _LossRule(
        lambda s: _GSPOTokenLoss(s["sequence_ratio_mask"], *_clip(s).values()),
        _SAMPLED | {"sequence_ratio_mask"},
        _CLIP,
    ),
    "dro": _LossRule(lambda s: _DROLoss(s["beta"]), _SAMPLED, {"beta": 0.05}),
}
_NOT_HERE = {
    "stable_reinforce": "It needs what Tinker's samplers record, which this server does not",
    "custom": "A loss cannot be uploaded; forward_backward_custom with a Python function works, since the SDK computes it",
}


def loss_of(
    loss: str,
    logps_P: Tensor,
    inputs: Mapping[str, Tensor],
    row_P: Tensor,
    num_rows: int,
    config: Mapping[str, float],
) -> Tensor:
    """The sum over the targets of rows that `check_rows` has accepted. `row_P`: the row that each target belongs to."""
    rule = LOSSES[loss]
    numbers = {**rule.defaults, **config}
    settings = {name: torch.tensor(float(value), device=logps_P.device) for name, value in numbers.items()}
    tokens = ActionTokens(
        logps=logps_P,
        weights=inputs["weights" if "weights" in rule.inputs else "advantages"],
        item_index=row_P,
        num_items=num_rows,
        facts=_WHOLE_BATCH,
        old_logps=inputs.get("logprobs"),
    )
    return rule.make({**settings, **inputs})(tokens)[0]


# --- refusals ---


def check_rows(loss: str, rows: Sequence[Row], config: Mapping[str, Any], *, vocab_size: int, max_tokens: int) -> None:
    """Raise ConfigError unless these rows can be trained on with this loss."""
    if loss not in LOSSES:
        why = f" {_NOT_HERE[loss]}." if loss in _NOT_HERE else ""
        raise ConfigError(f"There is no loss {loss!r} here.{why} There are {', '.join(LOSSES)}.")
    rule = LOSSES[loss]
    _check_config(loss, rule, config)
    if not rows:
        raise ConfigError("The request holds no data.")
    for number, row in enumerate(rows):
        problem = _problem(loss, rule, row, max_tokens)
        if not problem and row.inputs.keys() != rows[0].inputs.keys():
            problem = f"it has the loss_fn_inputs {sorted(row.inputs)}, but datum 0 has {sorted(rows[0].inputs)}."
        if problem:
            raise ConfigError(f"Datum {number} of {len(rows)}: {problem}")
    _check_numbers(rows, vocab_size)


def _check_config(loss: str, rule: _LossRule, config: Mapping[str, Any]) -> None:
    unknown = sorted(config.keys() - rule.defaults.keys())
    if unknown:
        known = ", ".join(f"{name} (default {value:g})" for name, value in rule.defaults.items()) or "none"
        raise ConfigError(f"{loss} has no settings {', '.join(unknown)} (loss_fn_config). It has: {known}.")
    for name, value in config.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise ConfigError(f"loss_fn_config[{name!r}] of {loss} is {value!r}; it must be a finite number.")


def _problem(loss: str, rule: _LossRule, row: Row, max_tokens: int) -> str | None:
    length, shape = len(row.tokens), row.targets.shape
    if not length:
        return "its model input is empty."
    if length > max_tokens:
        return (
            f"its model input has {length} tokens, more than the {max_tokens} that this server trains on. Shorten it."
        )
    if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
        return f"its model input has {length} tokens, but target_tokens has the shape {list(shape)}: one row per token is needed."
    if len(shape) == 2 and not rule.takes_several:
        return f"{loss} takes one target per token, but target_tokens has the shape {list(shape)}."
    allowed = rule.inputs | (rule.defaults.keys() & set(_BOUNDS))
    if not rule.inputs <= row.inputs.keys() <= allowed:
        given = ", ".join(["target_tokens", *sorted(row.inputs)])
        return f"{loss} takes the loss_fn_inputs target_tokens, {', '.join(sorted(rule.inputs))}; it was given {given}."
    for name, values in row.inputs.items():
        if values.shape != shape:
            return f"{name} has the shape {list(values.shape)}, but target_tokens has {list(shape)}."
    return None


def _check_numbers(rows: Sequence[Row], vocab_size: int) -> None:
    """Token ids outside of the vocabulary would stop a GPU for all runs, and NaN would spoil the run's gradient."""
    for number, row in enumerate(rows):
        for name, ids in (("model input", row.tokens), ("target_tokens", row.targets)):
            low, high = int(np.min(ids)), int(np.max(ids))
            if low < 0 or high >= vocab_size:
                wrong = low if low < 0 else high
                raise ConfigError(f"Datum {number}: {name} holds the id {wrong}; the model has {vocab_size} tokens.")
        for name, values in row.inputs.items():
            if not np.isfinite(values).all():
                raise ConfigError(f"Datum {number}: {name} holds NaN or infinity.")
