"""Completes vLLM's reload of a running model; inside vLLM's worker.

During an update vLLM holds each layer's weights as placeholders without values. The parameters' own loaders keep what they get
until a layer is complete; then vLLM brings the layer into the form that its kernels read, and copies it over the old one.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors


class LoadsCopies(TorchDispatchMode):
    """Loads what a model copies into a placeholder itself, past the parameter's loader (gpt-oss: experts and sinks). vLLM would
    drop it, and say so in its log only. For one update; the model's `load_weights` is called inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._is_loader_running = False
        self._places: dict[int, tuple[nn.Module, str, Tensor]] = {}
        """Layer, name and tensor by the tensor's storage. Keeping the tensor keeps the storage's address from being used again."""
        for layer in model.modules():
            if is_waiting(layer) and not isinstance(layer, (Attention, MLAAttention)):
                for tensor in get_layer_tensors(layer).values():
                    loader = getattr(tensor, "weight_loader", None)
                    if getattr(loader, "__name__", "") == "online_process_loader":
                        tensor.weight_loader = self._marked(loader)
                self._watch(layer)

    def _watch(self, layer: nn.Module) -> None:
        for name, tensor in get_layer_tensors(layer).items():
            if name not in SKIP_TENSORS:
                self._places[tensor.untyped_storage()._cdata] = layer, name, tensor

    def _marked(self, loader: Any) -> Any:
        """vLLM's loader, with a note of when it runs; under the same name, by which vLLM unwraps its loaders."""

        @wraps(loader)
        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            self._is_loader_running = True
            try:
                return loader(*args, **kwargs)
            finally:
                self._is_loader_running = False

        return online_process_loader

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not self._is_loader_running and not args[1].is_meta:
            place = self._places.get(args[0].untyped_storage()._cdata)
            if place is not None and get_layerwise_info(place[0]).can_load():
                self._load(*place[:2], target=args[0], value=args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _load(self, layer: nn.Module, name: str, *, target: Tensor, value: Tensor) -> None:
        info = get_layerwise_info(layer)
        materialize_layer(layer, info)
        self._watch(layer)
        held = getattr(layer, name).data
        held.as_strided(target.size(), target.stride(), target.storage_offset()).copy_(value)
        info.load_numel += target.numel()
        if info.load_numel >= get_layer_size(layer):
            _layerwise_process(layer, info)


def is_waiting(layer: nn.Module) -> bool:
    """Return True if an update has begun and the layer is not complete yet."""
    info = get_layerwise_info(layer)
    return info.can_load() and info.kernel_tensors is not None


def unloaded_layers(model: nn.Module) -> list[str]:
    """Layers that got nothing in this update: vLLM keeps their old weights."""
    waiting, loaded = dict[str, nn.Module](), set[int]()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if is_waiting(layer) and info.load_numel <= 0:
            waiting[name] = layer
        else:
            held = layer._parameters if info.kernel_tensors is None else info.kernel_tensors[0]
            loaded |= {weight.data_ptr() for weight in held.values() if weight is not None}
    return [
        name
        for name, layer in waiting.items()
        if not isinstance(layer, (Attention, MLAAttention))  # scales of a quantised cache, which no trainer has
        and any(weight.data_ptr() not in loaded for weight in get_layerwise_info(layer).kernel_tensors[0].values())
    ]


def forget_unfinished(model: nn.Module) -> None:
    """Undo a broken update: its queued or half-loaded weights would be taken for parts of this one."""
    for layer in filter(is_waiting, model.modules()):
        info = get_layerwise_info(layer)
        _place_kernel_tensors(layer, info)
        info.reset()


def pack_experts_again(model: nn.Module) -> None:
    """On a CPU experts compute with a packed layout. vLLM packs them where it makes their kernel, and a kernel that is there
    already would read what the loader copied without packing; without one it makes another."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_heads(model: nn.Module) -> None:
    """On a CPU a head tied to the embedding computes with a packed copy, which the loader does not update."""
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    embeddings = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    tables = {layer.weight.data_ptr() for layer in embeddings if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in tables:
            head.quant_method.process_weights_after_loading(head)
