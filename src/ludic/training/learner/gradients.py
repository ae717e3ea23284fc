"""The gradient of one batch: pack, forward, loss, backward, micro-batch by micro-batch.

Every number that a loss divides by is taken over the whole batch before the first micro-batch runs, so the gradient
does not depend on how the batch was cut, nor on how many ranks share it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.distributed.fsdp import sync_gradients
from ludic.distributed.ranks import Ranks
from ludic.models.head import EntropyMode
from ludic.training.critic.critic import Critic
from ludic.training.learner.frozen import Reference
from ludic.training.learner.metrics import MetricSums
from ludic.training.learner.packing import (
    PADDING_ITEM,
    ObservationFields,
    PackedBatch,
    collate_saw_items,
    episode_of,
    split_items_by_token_budget,
    split_packed,
)
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.learner.token_recorder import StepRecord
from ludic.training.losses import ActionTokens, BatchFacts, Loss, ObservedTokens, mismatch_stats
from ludic.training.losses.tokens import MAX_LOG_RATIO, Stats, sum_and_count
from ludic.types import ConfigError, SAWItem, spread_of


def batch_facts(items: Sequence[SAWItem]) -> BatchFacts:
    """The counts and statistics of a batch that losses divide by and compare with."""
    members: dict[str, list[SAWItem]] = {}
    for item in items:
        if (name := item.origin.objective) is not None:
            members.setdefault(name, []).append(item)
    return replace(_facts(items), by_objective={name: _facts(own) for name, own in members.items()})


def _facts(items: Sequence[SAWItem]) -> BatchFacts:
    num_tokens: Counter[str | None] = Counter()
    for item in items:
        num_tokens[episode_of(item)] += item.num_action_tokens
    num_alone = sum(episode_of(item) is None for item in items)
    weights = np.array([item.token_weights.mean(dtype=np.float64) for item in items], dtype=np.float64)
    named = {name: count for name, count in num_tokens.items() if name is not None}
    return BatchFacts(
        num_items=len(items),
        num_tokens=num_tokens.total(),
        num_observed=sum(int(np.count_nonzero(item.observation_mask)) for item in items),
        weight_mean=float(weights.mean()),
        weight_std=spread_of(weights),
        num_episodes=len(named) + num_alone,
        episode_tokens=named,
    )


def equal_micro_batches(
    policy: TrainedPolicy, items: Sequence[SAWItem], micro_token_budget: int, ranks: Ranks, *, padded: bool = False
) -> list[list[SAWItem]]:
    """The micro-batches of this rank, and empty ones until every rank has the same number; otherwise collectives deadlock."""
    if policy.packed and not padded:
        bins = split_packed(items, micro_token_budget, share_prefixes=policy.share_prefixes)
    else:
        bins = split_items_by_token_budget(items, micro_token_budget=micro_token_budget, max_seq_len=micro_token_budget)
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
    record: StepRecord | None = None,
    balance_experts: float = 0.0,
) -> MetricSums:
    """Add the batch's gradient to the parameters'; returns the metrics of the loss and of the sampler's mismatch.

    If `items` are one rank's share, `facts` are those of the whole batch, and gradients are summed over ranks. `record` gets what
    the loss was given of every token. `balance_experts` is the weight of a mixture's load-balancing loss.
    """
    facts = batch_facts(items) if facts is None else facts
    ranks = ranks or Ranks()
    sums = MetricSums()
    bins = equal_micro_batches(policy, items, micro_token_budget, ranks, padded=loss.needs.logits)
    batches: Iterable[PackedBatch] = (policy.batch(members, pad_token_id, padded=loss.needs.logits) for members in bins)
    load = policy.expert_load(ranks, balance_experts)
    if load is not None and load.needs_counting(len(bins)):
        batches = load.count(batches)
    for number, batch in enumerate(batches):
        sync_gradients(policy.model, is_last=number == len(bins) - 1)
        with policy.routed(batch) as routed:
            tokens = action_tokens(policy, loss, batch, facts, reference, critic, watch_entropy, teacher, pad_token_id)
            if batch.items[0] is PADDING_ITEM:
                _zero_loss(tokens).backward()
                continue
            if record is not None:
                record.watch(tokens)
            value, stats = _checked(loss, loss(tokens))
            balance = None if load is None or routed is None else load.part_of_loss(batch, routed)
            (value if balance is None else value + balance_experts * balance).backward()
        if record is not None:
            record.add(batch.items, tokens)
        sums.add({"loss": (value.detach(), tokens.num_items / facts.num_items), **stats, **mismatch_stats(tokens)})
        sums.add({"perf/prefix_sharing": (float(sum(batch.lengths)), float(batch.num_computed))})
        if tokens.entropy is not None:
            sums.add({"entropy": sum_and_count(tokens.entropy)})
    sums.add({"num_micro_batches": (float(len(bins)), 1.0)})
    if load is not None:
        sums.add(load.stats())
    return sums


def _checked(loss: Loss, found: Any) -> tuple[Tensor, Stats]:
    """ConfigError for a loss that returns something else than it should."""
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and found[0].dim() == 0
    if not is_pair or not isinstance(found[1], Mapping):
        shown = tuple(type(part).__name__ for part in found) if isinstance(found, tuple) else type(found).__name__
        raise ConfigError(
            f"{type(loss).__name__} returned {shown}; a loss returns a scalar tensor and {{name: (sum, count)}}."
        )
    wrong = [name for name, pair in found[1].items() if not isinstance(pair, tuple) or len(pair) != 2]
    if wrong:
        raise ConfigError(
            f"{type(loss).__name__}: the statistic {wrong[0]!r} is no pair (sum, count) over the micro-batch."
        )
    value, stats = found
    return value, stats


def _zero_loss(tokens: ActionTokens) -> Tensor:
    """Zero, computed from everything that a loss could use, so that all gradients exist and are zero."""
    observed = None if tokens.observed is None else tokens.observed.logps
    used = (tokens.logps, tokens.entropy, tokens.values, tokens.teacher_kl, observed)
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
    """The loss's view of one micro-batch."""
    entropy_mode: EntropyMode | None = "train" if loss.needs.entropy else "watch" if watch_entropy else None
    observations = batch.observations() if loss.needs.observations else None
    padded: tuple[Tensor, dict[str, Tensor]] | None = None
    if loss.needs.logits:
        logits_BLV = policy.whole_logits(batch)
        outputs = policy.outputs_of(logits_BLV, batch, entropy=entropy_mode, observations=observations)
        padded = logits_BLV, collate_saw_items(batch.items, pad_token_id=pad_token_id, device=policy.device)
    else:
        outputs = policy.outputs(batch, entropy=entropy_mode, observations=observations)
    hidden_AD = outputs.hidden_AD
    teacher_kl: Tensor | None = None
    if teacher is not None and loss.needs.teacher_kl is not None:
        own_AD = policy.action_hidden(batch) if hidden_AD is None else hidden_AD
        teacher_kl = policy.kl_to(teacher, own_AD, batch, loss.needs.teacher_kl)
    actions = batch.actions
    return ActionTokens(
        logps=outputs.logps_A,
        weights=actions.weight_A,
        item_index=actions.item_A,
        num_items=actions.num_items,
        facts=facts,
        old_logps=actions.old_logp_A,
        # In a batch's only update the weights are still those, and no other pass is needed.
        proximal_logps=actions.columns.get("proximal_logps", outputs.logps_A.detach()),
        ref_logps=reference.logps(batch) if reference is not None and loss.needs.reference else None,
        entropy=outputs.entropy_A,
        teacher_kl=teacher_kl,
        values=critic.values(batch, hidden_AD, policy) if critic is not None else None,
        returns=actions.columns.get("token_returns"),
        old_values=actions.columns.get("token_values"),
        objectives=actions.objectives,
        episodes=actions.episodes,
        comparisons=actions.comparisons,
        without_old_logps=actions.without_old_logps,
        observed=None if observations is None else _observed(observations, outputs.observed_O),
        padded=padded,
    )


def _observed(observations: ObservationFields, logps_O: Tensor | None) -> ObservedTokens:
    assert logps_O is not None, "the policy was asked for them"
    return ObservedTokens(logps=logps_O, item_index=observations.item_O)


@torch.no_grad()
def with_proximal_logps(
    policy: TrainedPolicy, items: Sequence[SAWItem], *, micro_token_budget: int, pad_token_id: int, ranks: Ranks
) -> list[SAWItem]:
    """The samples with their log-probs under the weights as they are."""
    found: dict[int, np.ndarray] = {}
    for members in equal_micro_batches(policy, items, micro_token_budget, ranks):
        batch = policy.batch(members, pad_token_id)
        with policy.routed(batch):
            logps_A = policy.logps(batch)[0].float().cpu().numpy()
        ends = np.cumsum([item.num_action_tokens for item in members])[:-1]
        found |= {id(item): own for item, own in zip(members, np.split(logps_A, ends), strict=True)}
    return [replace(item, attachments=replace(item.attachments, proximal_logps=found[id(item)])) for item in items]


class DriftProbe:
    """The step size of one update: KL per token of one micro-batch between the weights before and after it.

    The mismatch that every step logs (`kl_actor_policy`) is taken before the update: on-policy it is about 0 however fast the
    policy moves.
    """

    def __init__(self, policy: TrainedPolicy, items: Sequence[SAWItem], pad_token_id: int = 0) -> None:
        self._policy = policy
        self._batch = policy.batch(items, pad_token_id)
        self._counts = items[0] is not PADDING_ITEM
        self._before_A = self._logps()

    def measure(self) -> Stats:
        """`policy_drift`: KL(before ‖ after) per token (k3), as a sum over ranks; empty for a padding item."""
        difference_A = (self._logps() - self._before_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return {"policy_drift": sum_and_count(difference_A.exp() - 1 - difference_A)} if self._counts else {}

    @torch.no_grad()
    def _logps(self) -> Tensor:
        with self._policy.routed(self._batch):
            return self._policy.logps(self._batch)[0]
