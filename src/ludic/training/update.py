"""The gradient of one batch: pack, forward, loss, backward, micro-batch by micro-batch.

Every number that a loss divides by is taken over the whole batch before the first micro-batch runs, so the gradient
does not depend on how the batch was cut.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ludic.models.head import EntropyMode
from ludic.training.critic import ValueHead
from ludic.training.losses import ActionTokens, BatchFacts, Loss, mismatch_stats
from ludic.training.losses.tokens import over_tokens
from ludic.training.packing import PackedBatch, split_items_by_token_budget, split_packed
from ludic.training.policy import TrainedPolicy
from ludic.training.stats import StatSum
from ludic.types import SAWItem


class Reference(Protocol):
    """A frozen policy to stay close to."""

    def logps(self, batch: PackedBatch) -> Tensor: ...


def batch_facts(items: Sequence[SAWItem]) -> BatchFacts:
    """What losses divide by and compare with."""
    weights = np.array([item.token_weights.mean(dtype=np.float64) for item in items], dtype=np.float64)
    return BatchFacts(
        num_items=len(items),
        num_tokens=sum(item.num_action_tokens for item in items),
        weight_mean=float(weights.mean()),
        weight_std=float(weights.std()),
    )


def micro_batches(policy: TrainedPolicy, items: Sequence[SAWItem], micro_token_budget: int) -> list[list[SAWItem]]:
    if policy.packed:
        return split_packed(items, micro_token_budget)
    return split_items_by_token_budget(items, micro_token_budget=micro_token_budget, max_seq_len=micro_token_budget)


def accumulate_gradients(
    policy: TrainedPolicy,
    loss: Loss,
    items: Sequence[SAWItem],
    *,
    micro_token_budget: int,
    pad_token_id: int = 0,
    reference: Reference | None = None,
    value_head: ValueHead | None = None,
    watch_entropy: bool = False,
) -> StatSum:
    """Add the batch's gradient to the parameters'; what the loss and the mismatch have to say comes back."""
    facts = batch_facts(items)
    sums = StatSum()
    bins = micro_batches(policy, items, micro_token_budget)
    for members in bins:
        batch = policy.batch(members, pad_token_id)
        tokens = action_tokens(policy, loss, batch, facts, reference, value_head, watch_entropy)
        value, stats = loss.of(tokens)
        value.backward()
        sums.add({"loss": (value.detach(), tokens.num_items / facts.num_items), **stats, **mismatch_stats(tokens)})
        if tokens.entropy is not None:
            sums.add({"entropy": over_tokens(tokens.entropy)})
    sums.add({"num_micro_batches": (float(len(bins)), 1.0)})
    return sums


def action_tokens(
    policy: TrainedPolicy,
    loss: Loss,
    batch: PackedBatch,
    facts: BatchFacts,
    reference: Reference | None,
    value_head: ValueHead | None,
    watch_entropy: bool,
) -> ActionTokens:
    """What the loss sees of one micro-batch."""
    entropy_mode: EntropyMode | None = "train" if loss.needs_entropy else "watch" if watch_entropy else None
    hidden_AD = policy.action_hidden(batch)
    logps, entropy = policy.logps_of(hidden_AD, batch, entropy=entropy_mode)
    actions = batch.actions
    return ActionTokens(
        logps=logps,
        weights=actions.weight_A,
        item_index=actions.item_A,
        num_items=actions.num_items,
        facts=facts,
        old_logps=actions.old_logp_A,
        ref_logps=reference.logps(batch) if reference is not None and loss.needs_reference else None,
        entropy=entropy,
        values=value_head(hidden_AD) if value_head is not None else None,
        returns=actions.return_A,
        old_values=actions.value_A,
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
