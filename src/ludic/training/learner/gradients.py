"""The gradient of one batch: pack, forward, loss, backward, micro-batch by micro-batch.

Every number that a loss divides by is taken over the whole batch before the first micro-batch runs, so the gradient
does not depend on how the batch was cut, nor on how many ranks share it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ludic.distributed.fsdp import is_sharded, sync_gradients
from ludic.distributed.ranks import Ranks
from ludic.models.head import EntropyMode, plain_model
from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.critic.critic import Critic
from ludic.training.learner.metrics import MetricSums
from ludic.training.learner.packing import (
    PADDING_ITEM,
    PackedBatch,
    collate_saw_items,
    split_items_by_token_budget,
    split_packed,
)
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import ActionTokens, BatchFacts, Loss, mismatch_stats
from ludic.training.losses.tokens import sum_and_count
from ludic.types import ConfigError, SAWItem, spread_of


class Reference(Protocol):
    """A frozen policy to stay close to."""

    def logps(self, batch: PackedBatch) -> Tensor: ...


def batch_facts(items: Sequence[SAWItem]) -> BatchFacts:
    """What losses divide by and compare with."""
    members: dict[str, list[SAWItem]] = {}
    for item in items:
        if (name := item.origin.objective) is not None:
            members.setdefault(name, []).append(item)
    return replace(_facts(items), by_objective={name: _facts(own) for name, own in members.items()})


def _facts(items: Sequence[SAWItem]) -> BatchFacts:
    weights = np.array([item.token_weights.mean(dtype=np.float64) for item in items], dtype=np.float64)
    return BatchFacts(
        num_items=len(items),
        num_tokens=sum(item.num_action_tokens for item in items),
        weight_mean=float(weights.mean()),
        weight_std=spread_of(weights),
    )


def micro_batches(
    policy: TrainedPolicy, items: Sequence[SAWItem], micro_token_budget: int, *, padded: bool = False
) -> list[list[SAWItem]]:
    if policy.packed and not padded:
        return split_packed(items, micro_token_budget)
    return split_items_by_token_budget(items, micro_token_budget=micro_token_budget, max_seq_len=micro_token_budget)


def equal_micro_batches(
    policy: TrainedPolicy, items: Sequence[SAWItem], micro_token_budget: int, ranks: Ranks, *, padded: bool = False
) -> list[list[SAWItem]]:
    """Padded with empty micro-batches, so that every rank runs the same number; otherwise collectives deadlock."""
    bins = micro_batches(policy, items, micro_token_budget, padded=padded)
    return bins + [[PADDING_ITEM]] * (int(ranks.max(len(bins))) - len(bins))


def accumulate_gradients(
    policy: TrainedPolicy,
    loss: Loss,
    items: Sequence[SAWItem],
    *,
    micro_token_budget: int,
    pad_token_id: int = 0,
    reference: Reference | None = None,
    teacher: TrainedPolicy | None = None,
    critic: Critic | None = None,
    watch_entropy: bool = False,
    facts: BatchFacts | None = None,
    ranks: Ranks | None = None,
) -> MetricSums:
    """Add the batch's gradient to the parameters'; what the loss and the mismatch have to say comes back.

    Where `items` are one rank's share, `facts` are those of the whole batch, and gradients are summed over ranks.
    """
    facts = batch_facts(items) if facts is None else facts
    sums = MetricSums()
    bins = equal_micro_batches(policy, items, micro_token_budget, ranks or Ranks(), padded=loss.needs.logits)
    for number, members in enumerate(bins):
        batch = policy.batch(members, pad_token_id, padded=loss.needs.logits)
        sync_gradients(policy.model, is_last=number == len(bins) - 1)
        tokens = action_tokens(policy, loss, batch, facts, reference, critic, watch_entropy, teacher, pad_token_id)
        if members[0] is PADDING_ITEM:
            _zero_loss(tokens).backward()
            continue
        value, stats = loss(tokens)
        value.backward()
        sums.add({"loss": (value.detach(), tokens.num_items / facts.num_items), **stats, **mismatch_stats(tokens)})
        if tokens.entropy is not None:
            sums.add({"entropy": sum_and_count(tokens.entropy)})
    sums.add({"num_micro_batches": (float(len(bins)), 1.0)})
    return sums


def _zero_loss(tokens: ActionTokens) -> Tensor:
    """Zero, by way of everything that a loss could have used: the gradients are there, and are zero."""
    used = (tokens.logps, tokens.entropy, tokens.values, tokens.teacher_kl)
    return sum((values.sum() for values in used if values is not None), torch.zeros(())) * 0.0


def action_tokens(
    policy: TrainedPolicy,
    loss: Loss,
    batch: PackedBatch,
    facts: BatchFacts,
    reference: Reference | None,
    critic: Critic | None,
    watch_entropy: bool,
    teacher: TrainedPolicy | None = None,
    pad_token_id: int = 0,
) -> ActionTokens:
    """What the loss sees of one micro-batch."""
    entropy_mode: EntropyMode | None = "train" if loss.needs.entropy else "watch" if watch_entropy else None
    hidden_AD: Tensor | None = None
    padded: tuple[Tensor, dict[str, Tensor]] | None = None
    if loss.needs.logits:
        logits_BLV = policy.whole_logits(batch)
        logps, entropy = policy.logps_of(logits_BLV, batch, entropy=entropy_mode)
        padded = logits_BLV, collate_saw_items(batch.items, pad_token_id=pad_token_id, device=policy.device)
    else:
        hidden_AD, logps, entropy = policy.outputs(batch, entropy=entropy_mode)
    actions = batch.actions
    return ActionTokens(
        logps=logps,
        weights=actions.weight_A,
        item_index=actions.item_A,
        num_items=actions.num_items,
        facts=facts,
        old_logps=actions.old_logp_A,
        ref_logps=reference.logps(batch) if reference is not None and loss.needs.reference else None,
        entropy=entropy,
        teacher_kl=_teacher_kl(policy, teacher, hidden_AD, batch, loss),
        values=critic.values(batch, hidden_AD, policy) if critic is not None else None,
        returns=actions.return_A,
        old_values=actions.value_A,
        objectives=actions.objectives,
        without_old_logps=actions.without_old_logps,
        padded=padded,
    )


def _teacher_kl(
    policy: TrainedPolicy, teacher: TrainedPolicy | None, hidden_AD: Tensor | None, batch: PackedBatch, loss: Loss
) -> Tensor | None:
    if teacher is None or loss.needs.teacher_kl is None:
        return None
    return policy.kl_to(
        teacher, policy.action_hidden(batch) if hidden_AD is None else hidden_AD, batch, loss.needs.teacher_kl
    )


def make_reference(given: Any, algo: RLAlgorithm, policy: TrainedPolicy, cfg: TrainerConfig) -> Reference | None:
    """The reference that the algorithm compares with, if it does: the `given` model, or the one under the policy's adapter."""
    if not algo.loss.needs.reference:
        return None
    if given is not None:
        placed = given if is_sharded(given) else given.to(policy.device)
        frozen = placed.eval().requires_grad_(False)
        return FrozenReference(
            TrainedPolicy(frozen, packed=cfg.packed, mixed_precision_dtype=cfg.mixed_precision_dtype)
        )
    if plain_model(policy.model) is not policy.model:
        return AdapterOff(policy)
    raise ConfigError(
        f"{algo.name} compares with a frozen reference; give Trainer(reference=model), or train a LoRA adapter, whose "
        "base model is the reference."
    )


class FrozenReference:
    """Another model that is never trained."""

    def __init__(self, policy: TrainedPolicy) -> None:
        self._policy = policy

    @torch.no_grad()
    def logps(self, batch: PackedBatch) -> Tensor:
        return self._policy.logps(batch)[0]


class AdapterOff:
    """The base model under a peft adapter: a reference that takes no memory."""

    def __init__(self, policy: TrainedPolicy) -> None:
        self._policy = policy

    @torch.no_grad()
    def logps(self, batch: PackedBatch) -> Tensor:
        with self._policy.model.disable_adapter():
            return self._policy.logps(batch)[0]
