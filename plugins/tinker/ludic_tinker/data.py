"""Converts samples to Tinker's training data, and its log-probs to the tokens that a loss reads.

Tinker's built-in losses are sums over tokens, so a loss's normalisation goes into the advantages. A loss that Tinker does not
have is computed here from log-probs (`CustomLoss`), which takes one more forward pass at the service.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ludic.training.algorithms import CISPOLoss, MaskedCausalLMCrossEntropyLoss
from ludic.training.learner.packing import action_fields
from ludic.training.losses import ActionTokens, BatchFacts, Loss, TokenClippedSurrogateLoss
from ludic.training.losses.base import Bound
from ludic.types import ConfigError, FloatArray, SAWItem
from ludic_tinker.policy import BuiltInLoss, TrainRow

_CPU = torch.device("cpu")
Reducing = TokenClippedSurrogateLoss | CISPOLoss | MaskedCausalLMCrossEntropyLoss
"""Losses that are a reduction of one term per token."""


def built_in_of(loss: Loss) -> BuiltInLoss | None:
    """The service's equivalent of a loss; None if it has none."""
    if type(loss) is MaskedCausalLMCrossEntropyLoss:
        return BuiltInLoss("cross_entropy")
    if type(loss) is CISPOLoss:
        return BuiltInLoss("cispo", _thresholds(loss.clip_eps_low, loss.clip_eps_high))
    if type(loss) is TokenClippedSurrogateLoss and loss.ratio_clip is None and loss.behavior_cap is None:
        if loss.clip_eps_low >= 1 and loss.clip_eps_high == float("inf"):
            return BuiltInLoss("importance_sampling")  # a ratio is never below 0
        return BuiltInLoss("ppo", _thresholds(loss.clip_eps_low, loss.clip_eps_high))
    return None


def _thresholds(low: Bound, high: Bound) -> dict[str, float]:
    return {"clip_low_threshold": max(0.0, 1 - float(low)), "clip_high_threshold": 1 + float(high)}


def check_loss(loss: Loss, name: str) -> None:
    """Raise ConfigError if the loss needs more than log-probs of the sampled tokens."""
    needs = {
        "a critic": loss.needs.values,
        "the policy's entropy": loss.needs.entropy,
        "a reference": loss.needs.reference,
        "the old policy's log-probs": loss.needs.proximal,
        "a teacher's whole vocabulary": loss.needs.teacher_kl is not None,
        "log-probs of observations": loss.needs.observations,
        "whole logits": loss.needs.logits,
    }
    missing = [what for what, is_needed in needs.items() if is_needed]
    if missing:
        raise ConfigError(
            f"{name} needs {' and '.join(missing)}, but Tinker gives log-probs of the sampled tokens only. Use an algorithm "
            "without it (make_grpo, make_dr_grpo, make_cispo, make_rloo, make_reinforce, make_sft, …), or train with Trainer."
        )


def check_items(items: Sequence[SAWItem]) -> None:
    """Raise ConfigError for samples of a distribution that Tinker cannot train."""
    others = sorted({t for item in items if (t := item.attachments.temperature) not in (None, 1.0)})
    if others:
        raise ConfigError(
            f"Samples were drawn at temperature {', '.join(f'{t:g}' for t in others)}, but Tinker trains at 1: ratios would be "
            "wrong. Sample with SamplingParams(temperature=1.0)."
        )
    if any(item.attachments.candidates is not None for item in items):
        raise ConfigError(
            "Samples were drawn from a part of the vocabulary (top_p, top_k or min_p), but Tinker trains on all of it: ratios "
            "would be wrong. Sample without truncation."
        )


def rows_of(items: Sequence[SAWItem], loss: Loss, facts: BatchFacts) -> list[TrainRow]:
    """One row per sample."""
    built_in = built_in_of(loss)
    inputs = [{} for _ in items] if built_in is None else _loss_inputs(items, loss, built_in, facts)
    return [TrainRow(item.input_ids[:-1], item.input_ids[1:], own) for item, own in zip(items, inputs, strict=True)]


def _loss_inputs(
    items: Sequence[SAWItem], loss: Loss, built_in: BuiltInLoss, facts: BatchFacts
) -> list[dict[str, FloatArray]]:
    assert isinstance(loss, Reducing), "the others are not built in"
    # Log-probs are not known yet, and a reduction does not read them.
    tokens = tokens_of(items, [torch.zeros(len(item.input_ids) - 1) for item in items], facts)
    weights = (tokens.weights * _scale(loss, tokens)).numpy()
    if built_in.name == "cross_entropy":
        return [{"weights": own} for own in _at_targets(items, weights)]
    old = tokens.require_old_logps(type(loss).__name__).numpy()
    pairs = zip(_at_targets(items, old), _at_targets(items, weights), strict=True)
    return [{"logprobs": logprobs, "advantages": advantages} for logprobs, advantages in pairs]


def _scale(loss: Reducing, tokens: ActionTokens) -> Tensor:
    """[A] factor of each token's term in the batch's loss: the gradient of the reduction, which is linear."""
    terms = torch.ones_like(tokens.weights).requires_grad_()
    (scale,) = torch.autograd.grad(tokens.reduce_tokens(terms, loss.reduction), terms)
    return scale


def _at_targets(items: Sequence[SAWItem], values_A: np.ndarray) -> list[FloatArray]:
    """One value per target of each row: the action tokens' values, and zero elsewhere."""
    ends = np.cumsum([0, *(item.num_action_tokens for item in items)])
    spread = []
    for item, (start, end) in zip(items, pairwise(ends), strict=True):
        row = np.zeros(len(item.input_ids) - 1, dtype=np.float32)
        row[item.action_mask[1:]] = values_A[start:end]
        spread.append(row)
    return spread


def tokens_of(items: Sequence[SAWItem], logprobs: Sequence[Tensor], facts: BatchFacts) -> ActionTokens:
    """The action tokens that a loss reads, from the log-probs of every row's targets."""
    starts = np.cumsum([0, *(len(item.input_ids) - 1 for item in items)])[:-1]
    paths = [np.arange(start, start + len(item.input_ids)) for start, item in zip(starts, items, strict=True)]
    actions = action_fields(items, paths, _CPU)
    return ActionTokens(
        logps=torch.cat(list(logprobs)).index_select(0, actions.predictor_A),
        weights=actions.weight_A,
        item_index=actions.item_A,
        num_items=actions.num_items,
        facts=facts,
        old_logps=actions.old_logp_A,
        objectives=actions.objectives,
        episodes=actions.episodes,
        without_old_logps=actions.without_old_logps,
    )
