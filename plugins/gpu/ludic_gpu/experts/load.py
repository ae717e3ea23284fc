"""How evenly the tokens of a batch load the experts of a mixture, and the loss that evens it out."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ludic.distributed.ranks import Ranks
from ludic.training.learner.packing import PADDING_ITEM, PackedBatch
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses.tokens import Stats
from ludic_gpu.experts.routing import RouterPass


# Letters: T flat tokens, L mixture layers, E experts of a layer, K experts that a token is sent to.
def load_counts(chosen: RouterPass, tokens_T: Tensor, num_experts: int) -> Tensor:
    """[L, E] how many tokens each expert got, each token as often as `tokens_T` says (0 for padding)."""
    experts_LTK = torch.stack([chosen.chosen_TK[layer] for layer in sorted(chosen.chosen_TK)])
    num_layers, _, num_chosen = experts_LTK.shape
    counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=experts_LTK.device)
    weights_LN = tokens_T.to(torch.float64).repeat_interleave(num_chosen).expand(num_layers, -1)
    return counts_LE.scatter_add_(1, experts_LTK.flatten(1), weights_LN)


def load_stats(counts_LE: Tensor) -> dict[str, Tensor]:
    """How even the load of a batch is, as means over layers.

    `experts/busiest`: tokens of a layer's busiest expert relative to an even load (1 is even, E / K the worst).
    `experts/unused`: share of experts without any token. `experts/entropy`: of the load, relative to an even one (1 is even).
    """
    num_experts = counts_LE.shape[-1]
    share_LE = counts_LE / counts_LE.sum(dim=-1, keepdim=True)
    entropy_L = -torch.xlogy(share_LE, share_LE).sum(dim=-1) / math.log(max(num_experts, 2))
    return {
        "experts/busiest": (share_LE.max(dim=-1).values * num_experts).mean(),
        "experts/unused": (counts_LE == 0).to(torch.float64).mean(),
        "experts/entropy": entropy_L.mean(),
    }


def balance_loss(routed: RouterPass, tokens_T: Tensor, counts_LE: Tensor) -> Tensor:
    """This pass's part of the load-balancing loss of a batch whose whole load is `counts_LE`: the parts of all passes add up to it.

    Of a layer it is E · Σ_e f_e · P_e, with f_e the share of all choices that fell on expert e and P_e its mean probability
    (softmax of the logits) over the tokens of the batch; 1 if both are even. The result is the mean over layers. The gradient
    goes through P alone, and f is that of the whole batch, so it does not depend on how the batch is split into passes.
    """
    num_layers, num_experts = counts_LE.shape
    num_chosen = routed.chosen_TK[0].shape[-1]
    total = torch.zeros((), device=counts_LE.device)
    for layer in range(num_layers):
        share_E = (counts_LE[layer] / counts_LE[layer].sum()).float()
        num_tokens = counts_LE[layer].sum().float() / num_chosen
        probability_TE = torch.softmax(routed.logits_TE[layer].float(), dim=-1)
        weighted_E = (probability_TE * tokens_T.float()[:, None]).sum(dim=0)
        total = total + num_experts * (share_E * weighted_E).sum() / num_tokens
    return total / num_layers


class ExpertLoad:
    """How evenly the tokens of one batch load the experts of a mixture, and the loss that evens it out.

    The loss compares with the load of the whole batch, over all micro-batches and ranks. If there are several, one more forward
    pass counts it before the first gradient.
    """

    def __init__(self, policy: TrainedPolicy, ranks: Ranks, weight: float) -> None:
        assert policy.routers is not None, "only a mixture has a load"
        self._policy, self._weight, self._ranks = policy, weight, ranks
        self._shape = policy.routers.num_layers, policy.routers.num_experts
        self._counted_LE: Tensor | None = None
        """Loads of the whole batch, from the pass that counts."""
        self._own_LE: Tensor | None = None
        """Sums over this rank's micro-batches so far."""
        self._parts: list[Tensor] = []

    def needs_counting(self, num_micro_batches: int) -> bool:
        return self._weight > 0 and (num_micro_batches > 1 or self._ranks.world_size > 1)

    @torch.no_grad()
    def count(self, batches: Iterable[PackedBatch]) -> list[PackedBatch]:
        """Count the load of these micro-batches, and return them."""
        counted, kept = None, list(batches)
        for batch in kept:
            with self._policy.routed(batch) as routed:
                self._policy.action_hidden(batch)
            assert routed is not None, "a mixture is watched"
            own = self._counts(batch, routed)
            counted = own if counted is None else counted + own
        assert counted is not None, "every rank has a micro-batch"
        self._ranks.sum_tensors([counted])
        self._counted_LE = counted
        return kept

    def part_of_loss(self, batch: PackedBatch, routed: RouterPass) -> Tensor | None:
        """This micro-batch's part of the load-balancing loss; None if it is off."""
        own_LE = self._counts(batch, routed)
        self._own_LE = own_LE if self._own_LE is None else self._own_LE + own_LE
        if not self._weight:
            return None
        part = balance_loss(routed, batch.tokens_T(), own_LE if self._counted_LE is None else self._counted_LE)
        self._parts.append(part.detach())
        return part

    def stats(self) -> Stats:
        """Loads of the whole batch, the same on every rank."""
        own_LE = self._own_LE
        if own_LE is None:  # this rank had nothing but padding
            own_LE = torch.zeros(self._shape, dtype=torch.float64, device=self._policy.device)
        self._ranks.sum_tensors([own_LE])
        found: Stats = {name: (value, 1.0) for name, value in load_stats(own_LE).items()}
        if not self._weight:
            return found
        parts = sum(self._parts, torch.zeros((), device=self._policy.device))
        return {**found, "experts/balance_loss": (parts, 1 / self._ranks.world_size)}

    def _counts(self, batch: PackedBatch, routed: RouterPass) -> Tensor:
        is_padding = batch.items[0] is PADDING_ITEM
        tokens_T = batch.tokens_T()
        return load_counts(routed, torch.zeros_like(tokens_T) if is_padding else tokens_T, self._shape[1])
