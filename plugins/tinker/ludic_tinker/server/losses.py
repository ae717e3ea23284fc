"""The losses of the Tinker protocol: sums over tokens of a function of each token's log-probability.

`check_rows` refuses a request before anything is computed; `loss_terms` is what the training pass differentiates. Formulas are
those of Tinker's documentation. Log-ratios are bounded as in `ludic.training.losses`, far beyond where clipping acts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludic.training.losses.tokens import MAX_LOG_RATIO
from ludic.types import ConfigError, FloatArray, TokenArray

TargetArray: TypeAlias = npt.NDArray[np.int64]


# Letters: T tokens of a row, K targets of one position, P targets of all rows, B rows.
@dataclass(frozen=True, slots=True)
class Row:
    """One datum of a training request."""

    tokens: TokenArray
    """What the model reads."""
    targets: TargetArray
    """[T] the token after each position, or [T, K] several candidates for it."""
    inputs: Mapping[str, FloatArray]
    """What the loss is given of each target, by name; in the shape of the targets."""


@dataclass(frozen=True, slots=True)
class Targets:
    """All targets of some rows, flat, as a loss reads them."""

    logps_P: Tensor
    inputs: Mapping[str, Tensor]
    """Of each target."""
    row_P: Tensor
    """Which row each target belongs to."""
    num_rows: int

    def ratio(self) -> Tensor:
        """[P] trained over sampled probability."""
        return (self.logps_P - self.inputs["logprobs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def bound(self, name: str, settings: Mapping[str, float]) -> Tensor:
        """A clip threshold: of each target if the rows give it, else the request's."""
        own = self.inputs.get(name)
        return torch.tensor(settings[name], device=self.logps_P.device) if own is None else own

    def clipped(self, ratio_P: Tensor, settings: Mapping[str, float]) -> Tensor:
        low, high = (self.bound(name, settings) for name in _BOUNDS)
        return torch.minimum(torch.maximum(ratio_P, low), high)


Settings: TypeAlias = Mapping[str, float]
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")


def _cross_entropy(targets: Targets, settings: Settings) -> Tensor:
    return -targets.logps_P * targets.inputs["weights"]


def _importance_sampling(targets: Targets, settings: Settings) -> Tensor:
    return -targets.ratio() * targets.inputs["advantages"]


def _ppo(targets: Targets, settings: Settings) -> Tensor:
    return _pessimistic(targets, targets.ratio(), settings)


def _pessimistic(targets: Targets, ratio_P: Tensor, settings: Settings) -> Tensor:
    advantage_P = targets.inputs["advantages"]
    return -torch.minimum(ratio_P * advantage_P, targets.clipped(ratio_P, settings) * advantage_P)


def _cispo(targets: Targets, settings: Settings) -> Tensor:
    held_P = targets.clipped(targets.ratio().detach(), settings)
    return -held_P * targets.logps_P * targets.inputs["advantages"]


def _dro(targets: Targets, settings: Settings) -> Tensor:
    distance_P = targets.logps_P - targets.inputs["logprobs"]
    return -(targets.logps_P * targets.inputs["advantages"] - 0.5 * settings["beta"] * distance_P.square())


def _gspo(targets: Targets, settings: Settings) -> Tensor:
    """The ratio is the geometric mean over the marked tokens of a row; each token has its value, and the gradient of the
    token's log-probability."""
    is_marked_P = (targets.inputs["sequence_ratio_mask"] != 0).float()
    now_P = targets.logps_P.detach()
    sums_B, counts_B = torch.zeros(2, targets.num_rows, device=now_P.device)
    sums_B.index_add_(0, targets.row_P, (now_P - targets.inputs["logprobs"]) * is_marked_P)
    counts_B.index_add_(0, targets.row_P, is_marked_P)
    mean_B = (sums_B / counts_B.clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_P = torch.exp(mean_B.index_select(0, targets.row_P) + targets.logps_P - now_P)
    return _pessimistic(targets, ratio_P, settings)


@dataclass(frozen=True, slots=True)
class LossRule:
    """One loss: what it computes, and what a request gives it."""

    terms: Callable[[Targets, Settings], Tensor]
    """[P] one term per target; the loss is their sum."""
    inputs: frozenset[str]
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Settings of the request (`loss_fn_config`). A clip threshold may also be given per target, as an input."""
    takes_several: bool = False
    """Whether a position may have several targets."""


_SAMPLED = frozenset({"logprobs", "advantages"})
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": LossRule(_cross_entropy, frozenset({"weights"}), takes_several=True),
    "importance_sampling": LossRule(_importance_sampling, _SAMPLED),
    "ppo": LossRule(_ppo, _SAMPLED, _CLIP),
    "cispo": LossRule(_cispo, _SAMPLED, _CLIP),
    "gspo": LossRule(_gspo, _SAMPLED | {"sequence_ratio_mask"}, _CLIP),
    "dro": LossRule(_dro, _SAMPLED, {"beta": 0.05}),
}
_NOT_HERE = {
    "stable_reinforce": "It needs what Tinker's samplers record, which this server does not",
    "custom": "A loss cannot be uploaded; forward_backward_custom with a Python function works, since the SDK computes it",
}


def loss_terms(loss: str, targets: Targets, config: Mapping[str, float]) -> Tensor:
    """[P] one term per target of rows that `check_rows` has accepted; the loss is their sum."""
    rule = LOSSES[loss]
    return rule.terms(targets, {**rule.defaults, **config})


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


def _check_config(loss: str, rule: LossRule, config: Mapping[str, Any]) -> None:
    unknown = sorted(config.keys() - rule.defaults.keys())
    if unknown:
        known = ", ".join(f"{name} (default {value:g})" for name, value in rule.defaults.items()) or "none"
        raise ConfigError(f"{loss} has no settings {', '.join(unknown)} (loss_fn_config). It has: {known}.")
    for name, value in config.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise ConfigError(f"loss_fn_config[{name!r}] of {loss} is {value!r}; it must be a finite number.")


def _problem(loss: str, rule: LossRule, row: Row, max_tokens: int) -> str | None:
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
