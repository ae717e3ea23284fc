"""Which experts the routers of a mixture choose, recorded or replayed.

A router of a transformers mixture returns (logits, weights, indices) for every token. `Routers` puts a hook on each of them.
A pass that is `watched` keeps what the routers return; a pass with given experts takes those instead of the router's own
choice, and the router computes their weights from its own logits as usual (router replay). Sampler and trainer round
differently, and where two experts nearly tie, that changes the choice and with it the output by far more than rounding.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ludic.models.head import plain_model
from ludic.models.kinds import router_modules
from ludic.models.weights import HookOfOneTree
from ludic.types import ConfigError

UNKNOWN = -1
"""In an array of experts: not recorded, so the router chooses."""


# Letters: T flat tokens, L mixture layers, E experts of a layer, K experts that a token is sent to.
@dataclass(slots=True, eq=False)
class RouterPass:
    """What the routers did in one forward pass, by layer."""

    given_TLK: Tensor | None = None
    """Experts to take; UNKNOWN where the router chooses. None: everywhere."""
    logits_TE: dict[int, Tensor] = field(default_factory=dict)
    """Of every expert, with their gradient."""
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
        """None if the model is no mixture."""
        return cls(model) if router_modules(model) else None

    @contextlib.contextmanager
    def watched(self, given_TLK: Tensor | None = None) -> Iterator[RouterPass]:
        """Forward passes inside are recorded, the last one of each layer. With `given_TLK` they take these experts, and so do
        recomputations of checkpointed layers: a backward pass belongs inside, too."""
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
    """Of one router: records what it returns, and makes it take given experts."""

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
