"""Tinker's built-in losses as its documentation states them: plain sums over tokens, not normalised.

Written from those formulas alone, and not from ludic.training.losses, which tests compare them with.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NEEDED = {
    "cross_entropy": {"target_tokens", "weights"},
    "importance_sampling": {"target_tokens", "logprobs", "advantages"},
    "ppo": {"target_tokens", "logprobs", "advantages"},
    "cispo": {"target_tokens", "logprobs", "advantages"},
}
"""The inputs that each loss takes, neither more nor less."""
CONFIGURABLE = {
    "ppo": {"clip_low_threshold", "clip_high_threshold"},
    "cispo": {"clip_low_threshold", "clip_high_threshold"},
}


def check_inputs(loss_fn: str, inputs: Mapping[str, Any], config: Mapping[str, float], length: int) -> None:
    """ValueError for what the service would refuse."""
    if loss_fn not in NEEDED:
        raise ValueError(f"Unknown loss_fn {loss_fn!r}")
    if set(inputs) != NEEDED[loss_fn]:
        raise ValueError(f"{loss_fn} takes {sorted(NEEDED[loss_fn])}, got {sorted(inputs)}")
    if set(config) - CONFIGURABLE.get(loss_fn, set()):
        raise ValueError(f"{loss_fn} has no settings {sorted(config)}")
    wrong = {name: len(values) for name, values in inputs.items() if len(values) != length}
    if wrong:
        raise ValueError(f"The model input has {length} tokens, but loss_fn_inputs have {wrong}")


def loss_of(loss_fn: str, logps: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """The loss of one datum; `logps` are those of its target tokens."""
    if loss_fn == "cross_entropy":
        return (-logps * inputs["weights"]).sum()
    ratio = torch.exp(logps - inputs["logprobs"])
    advantages = inputs["advantages"]
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    held = torch.clamp(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    if loss_fn == "ppo":
        return -torch.min(ratio * advantages, held * advantages).sum()
    return -(held.detach() * logps * advantages).sum()
