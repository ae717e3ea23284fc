"""Dense weights of a model with adapters, without touching the model.

Merging in place and back again leaves rounding in the frozen weights, a little more every step; here the merged
weight is a new tensor. Of a sharded model one weight (or one layer with an adapter) at a time is put together; all ranks
do it in the same order.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.models.head import plain_model
from ludic.models.shared_view import shared_view
from ludic.types import ConfigError, MissingExtra, derive_seed


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One weight as a server needs it, before anybody has read it."""

    name: str
    """In the plain model."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """The values, adapters merged. On all ranks if the model is sharded."""

    def without_values(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def dense_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name in the plain model, weight) of everything that a server needs, adapters merged; tied weights once."""
    for weight in dense_weights(model):
        yield weight.name, weight.read()


def dense_weights(model: Any) -> Iterator[DenseWeight]:
    """The same, to be read one by one."""
    inner = plain_model(model)
    if inner is model:
        yield from (_own(name, parameter) for name, parameter in model.named_parameters())
    else:
        yield from _dense(inner, "", {id(parameter) for parameter in inner.parameters()}, _LastMerged())


def _own(name: str, parameter: Tensor) -> DenseWeight:
    return DenseWeight(name, tuple(parameter.shape), parameter.dtype, lambda: _whole(parameter))


@torch.no_grad()
def _whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _dense(module: nn.Module, prefix: str, left: set[int], merged: "_LastMerged") -> Iterator[DenseWeight]:
    """`left` are the model's own parameters that have not been given out; merged copies are not in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = _without_wrapper(module)
    if isinstance(plain, BaseTunerLayer):
        for name, parameter in plain.get_base_layer().named_parameters():
            read = _merged_reader(merged, plain, name)
            yield DenseWeight(prefix + name, tuple(parameter.shape), parameter.dtype, read)
        return
    for name, parameter in plain.named_parameters(recurse=False):
        if id(parameter) in left:
            left.remove(id(parameter))
            yield _own(prefix + name, parameter)
    for name, child in plain.named_children():
        yield from _dense(child, f"{prefix}{name}.", left, merged)


def _without_wrapper(module: nn.Module) -> nn.Module:
    """What stands here in a model without peft's wrappers, adapters excepted."""
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        is_on = active and not module.disable_adapters
        return module.modules_to_save[active[0]] if is_on else module.original_module
    return module.token_adapter if isinstance(module, TrainableTokensWrapper) else module


def _merged_reader(merged: "_LastMerged", layer: nn.Module, name: str) -> Callable[[], Tensor]:
    return lambda: merged.base_of(layer).get_parameter(name).detach()


class _LastMerged:
    """Keeps the layer that was merged last: its weight and its bias are read one after the other."""

    def __init__(self) -> None:
        self._layer: nn.Module | None = None
        self._base: nn.Module | None = None

    def base_of(self, layer: nn.Module) -> nn.Module:
        if self._layer is not layer or self._base is None:
            self._layer, self._base = layer, _merge(layer)
        return self._base


@torch.no_grad()
def _merge(layer: Any) -> nn.Module:
    """peft merges into a copy of the one layer; a sharded layer's copy is whole.

    On a single rank `full_tensor` is the very memory of the weight: merging into it would change the frozen base.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.full_tensor().clone(), requires_grad=False)
        for p in layer.parameters()
        if isinstance(p, DTensor)
    }
    merged = copy.deepcopy(layer, memo)
    if not merged.disable_adapters and set(merged.active_adapters) - set(merged.merged_adapters):
        merged.merge()
    base: nn.Module = merged.get_base_layer()
    return base


def adapter_problem(model: Any) -> str | None:
    """Why training this model's adapter would change nothing; None when it would (or there is none)."""
    if plain_model(model) is model:
        return None
    prompts = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    if prompts:
        return f"{prompts} are learned prompts, which packed training does not put before its samples; use LoRA"
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        return "none of its parameters requires a gradient (is_trainable=False?)"
    active = set(model.active_adapters) if hasattr(model, "active_adapters") else set()
    if active and not any(f".{name}." in parameter for parameter in trainable for name in active):
        return f"the active adapters {sorted(active)} are frozen; what is trainable belongs to others"
    return None


# ----------------------------------------------------------------------------------------------------
# Several LoRA policies over one base model, whose weights are in memory once.
# ----------------------------------------------------------------------------------------------------
# peft can hold several adapters in one model, but then which of them is switched on is a state of that model: a policy that is
# trained and another that is sampled would have to take turns. Here every policy is a model of its own, with modules of its own
# over the base's very tensors, so none can see what is switched on in another.


def adapters_on(base: Any, names: Sequence[str], config: Any, *, seed: int = 0) -> dict[str, Any]:
    """A peft model for every name, each with a new adapter of `config` (peft's LoraConfig). `base` is frozen by it.

    The first values of an adapter depend on `seed` and its place among the names, and on no other random number.
    """
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", "several adapters on one base model") from error
    if plain_model(base) is not base:
        raise ConfigError(
            f"adapters_on was given a {type(base).__name__}, which has an adapter already. Give the model under it "
            "(get_base_model()), or merge the adapter first (merge_and_unload())."
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"adapters_on was given the names {list(names)}; each policy needs a name of its own.")
    base.requires_grad_(False)
    made = {}
    for number, name in enumerate(names):
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, number))
            made[name] = get_peft_model(shared_view(base), copy.deepcopy(config))
    return made
