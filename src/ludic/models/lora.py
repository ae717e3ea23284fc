"""Dense weights of a model with LoRA adapters, and several LoRA policies over one base model.

Merging in place and unmerging leaves rounding errors in the frozen weights at every step; here the merged weight is a
new tensor. Of a sharded model one weight (or one layer with an adapter) is gathered at a time, by all ranks in the same order.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.models.head import plain_model, whole
from ludic.models.kinds import is_quantized, is_recurrent, part
from ludic.models.weights import shared_view
from ludic.types import ConfigError, MissingExtra, derive_seed


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One weight in the form that a server loads; its values are read lazily."""

    name: str
    """Its name in the plain model."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns the values with adapters merged. If the model is sharded, all ranks must call it."""

    def without_values(self) -> Tensor:
        """A meta tensor of its shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def dense_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name in the plain model, weight) of everything a server loads, adapters merged; tied weights once."""
    for weight in dense_weights(model):
        yield weight.name, weight.read()


def dense_weights(model: Any) -> Iterator[DenseWeight]:
    """The same weights, to be read one by one."""
    inner = plain_model(model)
    if inner is model:
        yield from (_own(name, parameter) for name, parameter in model.named_parameters())
    else:
        yield from _dense(inner, "", {id(parameter) for parameter in inner.parameters()}, _LastMerged())


def _own(name: str, parameter: Tensor) -> DenseWeight:
    return DenseWeight(name, tuple(parameter.shape), parameter.dtype, lambda: whole(parameter.detach()))


def _dense(module: nn.Module, prefix: str, left: set[int], merged: "_LastMerged") -> Iterator[DenseWeight]:
    """`left` holds the ids of the model's own parameters not yet yielded; merged copies are not in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = _without_wrapper(module)
    if is_quantized(plain.get_base_layer() if isinstance(plain, BaseTunerLayer) else plain):
        yield from _dequantized(plain, prefix)
        return
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


def _dequantized(layer: Any, prefix: str) -> Iterator[DenseWeight]:
    """The weights of a layer in four bits, with its adapters added."""
    base = layer if is_quantized(layer) else layer.get_base_layer()
    in_four_bits, dtype = part("quantized"), base.compute_dtype
    make = in_four_bits.dense_linear if base is layer else in_four_bits.merged_linear
    shape = base.out_features, base.in_features
    yield DenseWeight(f"{prefix}weight", shape, dtype, lambda: make(layer, dtype).weight.detach())
    if base.bias is not None:
        yield _own(f"{prefix}bias", base.bias)


def _without_wrapper(module: nn.Module) -> nn.Module:
    """The module inside peft's wrappers; LoRA layers stay."""
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        is_on = active and not module.disable_adapters
        return module.modules_to_save[active[0]] if is_on else module.original_module
    return module.token_adapter if isinstance(module, TrainableTokensWrapper) else module


def _merged_reader(merged: "_LastMerged", layer: nn.Module, name: str) -> Callable[[], Tensor]:
    return lambda: merged.base_of(layer).get_parameter(name).detach()


class _LastMerged:
    """Caches the last merged layer, whose weight and bias are read one after the other."""

    def __init__(self) -> None:
        self._layer: nn.Module | None = None
        self._base: nn.Module | None = None

    def base_of(self, layer: nn.Module) -> nn.Module:
        if self._layer is not layer or self._base is None:
            self._layer, self._base = layer, _merge(layer)
        return self._base


@torch.no_grad()
def _merge(layer: Any) -> nn.Module:
    """Merge into a copy of the layer; the copy of a sharded layer is gathered.

    On a single rank `full_tensor` shares the weight's memory, so it is cloned: merging would change the frozen base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.full_tensor().clone(), requires_grad=False)
        for p in layer.parameters()
        if isinstance(p, DTensor)
    }
    merged = copy.deepcopy(layer, memo)
    inner: Any = merged
    while isinstance(inner, BaseTunerLayer):  # the adapters of a module's several parameters lie inside each other
        if not inner.disable_adapters and set(inner.active_adapters) - set(inner.merged_adapters):
            inner.merge()
        inner = inner.base_layer  # type: ignore[attr-defined]
    base: nn.Module = inner
    return base


_READ_DIRECTLY = ("out_proj", "dt_proj")
"""Layers of a Mamba mixer whose weights its kernels (and Jamba's own code) read without calling the layer."""


def not_adaptable(model: nn.Module) -> list[str]:
    """Names of linear layers on which an adapter would be skipped by the forward pass, or that are not called as one."""
    found = []
    for name, module in model.named_modules():
        if is_recurrent(module) and hasattr(module, "D"):  # of the recurrent mixers, only Mamba's have this vector
            found += [
                f"{name}.{child}" for child in _READ_DIRECTLY if isinstance(getattr(module, child, None), nn.Linear)
            ]
        elif isinstance(module, nn.Linear) and type(module).__module__.startswith("transformers.models."):
            found.append(name)  # Llama 4's router returns more than a product
    return found


def adapted_layers(model: Any) -> str | list[str]:
    """peft's `target_modules` for all linear layers but the output layer. peft refuses "all-linear" for some models with Mamba
    mixers even where those layers are excluded, so there all others are named."""
    left_out = not_adaptable(model)
    if not any(name.endswith(_READ_DIRECTLY) for name in left_out):
        return "all-linear"
    left_out.append(next(name for name, module in model.named_modules() if module is model.get_output_embeddings()))
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in left_out]


def adapter_problem(model: Any) -> str | None:
    """Why training this model's adapter would change nothing; None if it trains or there is no adapter."""
    if plain_model(model) is model:
        return None
    prompts = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    if prompts:
        return f"{prompts} are learned prompts, which packed training does not prepend to its samples; use LoRA"
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        return "none of its parameters requires a gradient (is_trainable=False?)"
    active = set(model.active_adapters) if hasattr(model, "active_adapters") else set()
    if active and not any(f".{name}." in parameter for parameter in trainable for name in active):
        return f"the active adapters {sorted(active)} are frozen; only other adapters are trainable"
    return None


def adapters_on(base: Any, names: Sequence[str], config: Any, *, seed: int = 0) -> dict[str, Any]:
    """A peft model for every name, each with a new adapter of `config` (peft's LoraConfig). Freezes `base`.

    In one peft model the active adapter is state of that model, so training one policy and sampling another would have to take
    turns. Here every policy has its own modules over the base's tensors, which are in memory once. An adapter's initial values
    depend only on `seed` and its index among the names.
    """
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", "several adapters on one base model") from error
    if plain_model(base) is not base:
        raise ConfigError(
            f"adapters_on got a {type(base).__name__}, which already has an adapter. Pass its base model "
            "(get_base_model()), or merge the adapter first (merge_and_unload())."
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"adapters_on got the names {list(names)}; policies need different names.")
    base.requires_grad_(False)
    made = {}
    for number, name in enumerate(names):
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, number))
            made[name] = get_peft_model(shared_view(base), copy.deepcopy(config))
    return made
