"""Mixtures of experts: their routers recorded and replayed, how even their load is, and LoRA on experts.

A router of a transformers mixture returns (logits, weights, indices) for every token. `Routers` puts a hook on each of them.
A pass that is `watched` keeps what the routers return; a pass with given experts takes those instead of the router's own
choice, and the router computes their weights from its own logits as usual (router replay). Sampler and trainer round
differently, and where two experts nearly tie, that changes the choice and with it the output by far more than rounding.
"""

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ludic.distributed.ranks import Ranks
from ludic.models.head import plain_model
from ludic.models.kinds import adapts_experts, router_modules
from ludic.models.weights import HookOfOneTree
from ludic.training.learner.packing import PADDING_ITEM, PackedBatch
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses.tokens import Stats
from ludic.types import ConfigError

UNKNOWN = -1
"""In an array of experts: not recorded, so the router chooses."""


# Letters: T flat tokens, L mixture layers, E experts of a layer, K experts that a token is sent to.
@dataclass(slots=True, eq=False)
class RouterPass:
    """The results of the routers in one forward pass, by layer."""

    given_TLK: Tensor | None = None
    """Experts to take; UNKNOWN where the router chooses. None: everywhere."""
    logits_TE: dict[int, Tensor] = field(default_factory=dict)
    """Logits of every expert, with their gradient."""
    chosen_TK: dict[int, Tensor] = field(default_factory=dict)

    def experts_TLK(self) -> Tensor:
        """The chosen experts, as int16."""
        layers = [self.chosen_TK[layer] for layer in sorted(self.chosen_TK)]
        return torch.stack(layers, dim=1).to(torch.int16)


class Routers:
    """The routers of one mixture, each with a hook that does nothing outside of `watched`."""

    def __init__(self, model: Any) -> None:
        named = router_modules(model)
        found = [module for _, module in named]
        if not found:
            raise ConfigError(
                f"{type(plain_model(model)).__name__} has no routers that Ludic can watch: it is no mixture of experts, or not "
                "one whose routers return (logits, weights, indices)."
            )
        self._hooks = [_Hook(number) for number in range(len(found))]
        self._handles = [m.register_forward_hook(h, with_kwargs=True) for m, h in zip(found, self._hooks, strict=True)]
        self.num_layers = len(found)
        self._depths = [_depth(name) for name, _ in named]
        self._num_decoder_layers = int(plain_model(model).config.get_text_config().num_hidden_layers)
        first: Any = found[0]
        self.num_experts, self.num_chosen = int(first.num_experts), int(first.top_k)

    @classmethod
    def of(cls, model: Any) -> "Routers | None":
        """None if the model is not a mixture."""
        return cls(model) if router_modules(model) else None

    @contextlib.contextmanager
    def watched(self, given_TLK: Tensor | None = None) -> Iterator[RouterPass]:
        """Forward passes inside are recorded, the last one of each layer. With `given_TLK` they take these experts, and so do
        recomputations of checkpointed layers: a backward pass also belongs inside."""
        if given_TLK is not None:
            given_TLK = self._of_mixture_layers(given_TLK)
        now = RouterPass(None if given_TLK is None else given_TLK.long())
        before = [hook.now for hook in self._hooks]
        for hook in self._hooks:
            hook.now = now
        try:
            yield now
        finally:
            for hook, outer in zip(self._hooks, before, strict=True):
                hook.now = outer

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Passes inside are neither recorded nor changed, even within `watched`: those of a reference on the same modules."""
        with self.watched():
            yield

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _of_mixture_layers(self, given_TLK: Tensor) -> Tensor:
        """vLLM has a column for every layer, also for those without experts."""
        wanted = (self.num_layers, self.num_chosen)
        is_of_all = tuple(given_TLK.shape[1:]) == (self._num_decoder_layers, self.num_chosen)
        if is_of_all and self.num_layers < self._num_decoder_layers and None not in self._depths:
            return given_TLK[:, self._depths]
        if given_TLK.dim() != 3 or tuple(given_TLK.shape[1:]) != wanted:
            raise ConfigError(
                f"The recorded experts have the shape {list(given_TLK.shape)}; this model has [tokens, {wanted[0]} mixture layers, "
                f"{wanted[1]} experts per token]. They were recorded by another model."
            )
        return given_TLK


@contextlib.contextmanager
def recording(model: Any) -> Iterator[RouterPass]:
    """Record the experts that a model chooses: `experts_TLK()` of what it yields, after the forward pass."""
    with replaying(model, None) as now:
        yield now


@contextlib.contextmanager
def replaying(model: Any, experts_TLK: Tensor | None) -> Iterator[RouterPass]:
    """Forward passes inside send every token to these experts; UNKNOWN (-1) leaves the choice to the router."""
    routers = Routers(model)
    try:
        with routers.watched(experts_TLK) as now:
            yield now
    finally:
        routers.remove()


def _depth(name: str) -> int | None:
    """The layer of a module, by its name."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return int(numbers[0]) if numbers else None


class _Hook(HookOfOneTree):
    """The hook of one router: records what it returns, and makes it take given experts."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._is_checked = False
        self.now: RouterPass | None = None

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        now = self.now
        if now is None:
            return None
        if now.given_TLK is not None:
            output = self._replayed(module, args, kwargs, output, now.given_TLK[:, self._layer])
        logits, _, chosen = output
        now.logits_TE[self._layer], now.chosen_TK[self._layer] = logits, chosen
        return output

    def _replayed(self, module: Any, args: Any, kwargs: Any, output: Any, given_TK: Tensor) -> Any:
        own_TK = output[2]
        if len(given_TK) != len(own_TK):
            raise ConfigError(f"Experts are given for {len(given_TK)} tokens, but the pass has {len(own_TK)}.")
        wanted_TK = torch.where(given_TK == UNKNOWN, own_TK, given_TK.to(own_TK.device))
        with _Choice(wanted_TK, int(module.num_experts)):
            output = module.forward(*args, **kwargs)
        if not self._is_checked:
            if not torch.equal(output[2], wanted_TK):
                raise ConfigError(
                    f"{type(module).__name__} does not choose its experts by one topk over all of them, so recorded experts "
                    "cannot be replayed. Train without replay_experts."
                )
            self._is_checked = True
        return output


class _TopK(NamedTuple):
    values: Tensor
    indices: Tensor


class _Choice(TorchFunctionMode):
    """Inside it, `topk` over all experts returns given ones. Whatever a family computes around it (softmax before or after,
    sigmoid, normalisation, scaling) stays its own."""

    def __init__(self, wanted_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._wanted_TK, self._num_experts = wanted_TK, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            if scores.shape == (len(self._wanted_TK), self._num_experts):
                return _TopK(scores.gather(-1, self._wanted_TK), self._wanted_TK)
        return func(*args, **kwargs)


# Letters: T flat tokens, L mixture layers, E experts of a layer, K experts that a token is sent to.
def load_counts(chosen: RouterPass, tokens_T: Tensor, num_experts: int) -> Tensor:
    """[L, E] how many tokens each expert got, each token as often as `tokens_T` says (0 for padding)."""
    experts_LTK = torch.stack([chosen.chosen_TK[layer] for layer in sorted(chosen.chosen_TK)])
    num_layers, _, num_chosen = experts_LTK.shape
    counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=experts_LTK.device)
    weights_LN = tokens_T.to(torch.float64).repeat_interleave(num_chosen).expand(num_layers, -1)
    return counts_LE.scatter_add_(1, experts_LTK.flatten(1), weights_LN)


def load_stats(counts_LE: Tensor) -> dict[str, Tensor]:
    """Evenness of the load of a batch, as means over layers.

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
    """The load of a mixture's experts by the tokens of one batch, and the loss that evens it out.

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


_EXPERTS = "experts"


def expert_parameters(model: Any) -> list[str]:
    """Names of the matrices of experts, for LoraConfig(target_parameters=…); empty if the model is not a mixture."""
    return sorted(
        {
            f"{_EXPERTS}.{own}"
            for name, module in model.named_modules()
            if name.split(".")[-1] == _EXPERTS
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
        }
    )


class _MergedExperts:
    """Experts of one layer with their adapters added, in the place of peft's wrappers."""

    def __init__(self, wrapper: Any) -> None:
        base = wrapper.get_base_layer()
        self._wrappers = _nested(wrapper)
        self.plain: nn.Module = copy.deepcopy(base, {id(p): p for p in base.parameters()})
        for each in self._wrappers:
            merged = nn.Parameter(each.get_param().detach().clone(), requires_grad=False)
            setattr(self.plain, each.parameter_name, merged)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Add the adapters to the base weights as they are now."""
        for each in self._wrappers:
            merged = self.plain.get_parameter(each.parameter_name)
            merged.copy_(each.get_param())
            if not each.disable_adapters:
                for name in each.active_adapters:
                    if name in each.lora_A and name not in each.merged_adapters:
                        merged.add_(each.get_delta_weight(name))


def merge_experts(view: Any) -> list[_MergedExperts]:
    """Replace adapted experts of a module tree, which must be the caller's alone, by merged copies."""
    made = []
    for parent in list(view.modules()):
        for name, child in parent.named_children():
            if adapts_experts(child) and not adapts_experts(parent):
                merged = _MergedExperts(child)
                setattr(parent, name, merged.plain)
                made.append(merged)
    return made


def _nested(wrapper: Any) -> list[Any]:
    """One wrapper per adapted parameter, each inside the one before."""
    found = []
    while adapts_experts(wrapper):
        found.append(wrapper)
        wrapper = wrapper.base_layer
    return found
