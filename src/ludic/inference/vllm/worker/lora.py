"""The worker's side of an adapter push, inside a vLLM that was started with --enable-lora.

vLLM's API server knows an adapter by name, number and path, and every request carries these three. Its own replacement,
`load_inplace`, is carried by every later request too: the worker then reads the files again at each step, and a
request that began earlier continues with the old files, whatever its reported version. So vLLM's endpoint registers an adapter
once, and this code replaces it under its number.
"""

from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from ludic.inference.vllm.buckets import checksum

ADAPTER_WEIGHTS = "adapter_model.safetensors"
NUM_COMPARED = 16
"""Compared values of each base weight."""


class AdapterSync:
    """Mixed into vLLM's worker; `/collective_rpc` can call each method, and converts all results but lists and dicts to text."""

    model_runner: Any
    vllm_config: Any
    ludic_adapters: ClassVar[dict[str, int]] = {}
    """Number of each adopted adapter; every worker is a separate process."""

    def ludic_lora_limits(self) -> dict[str, Any] | None:
        """None if LoRA is off."""
        config = self.vllm_config.lora_config
        return None if config is None else {"max_rank": config.max_lora_rank}

    def ludic_base_values(self, shapes: dict[str, list[int]]) -> dict[str, list[float]]:
        """The first values of weights that this worker stores like the trainer: neither fused nor sharded nor packed."""
        held = {
            name.replace(".base_layer.", "."): weight
            for name, weight in self.model_runner.get_model().named_parameters()
        }
        rows = {name: held[name][: shape[0]] for name, shape in shapes.items() if name in held and held[name].dim()}
        return {
            name: weight.detach().reshape(-1)[:NUM_COMPARED].float().tolist()
            for name, weight in rows.items()
            if list(weight.shape) == shapes[name]
        }

    def ludic_try_adapter(self, path: str) -> list[str]:
        """Load it as for serving and discard it, so that an unservable adapter is found while generation continues.

        Returns the modules that this worker would silently leave out.
        """
        manager = self.model_runner.lora_manager
        adapter = manager._load_adapter(LoRARequest("ludic", 1, path))
        served = _served(manager)
        parts = {part for parts in served.packed_modules.values() for part in parts}
        return sorted(adapter.loras.keys() - served.modules.keys() - parts)

    def ludic_adapter_ids(self) -> list[int]:
        return sorted(self.model_runner.lora_manager.list_adapters())

    def ludic_adopt_adapter(self, name: str, before: list[int]) -> None:
        """Give this name to the adapter that was not loaded before."""
        (number,) = set(self.ludic_adapter_ids()) - set(before)
        if name in self.ludic_adapters:
            self.model_runner.lora_manager.remove_adapter(self.ludic_adapters[name])
        self.ludic_adapters[name] = number

    def ludic_adopted(self) -> list[str]:
        """Names of the replaceable adapters."""
        return sorted(self.ludic_adapters)

    def ludic_replace_adapter(self, name: str, path: str) -> None:
        request = LoRARequest(name, self.ludic_adapters[name], path, load_inplace=True)
        self.model_runner.lora_manager.add_adapter(request)

    def ludic_received_adapter(self, name: str, path: str, tensors: list[str]) -> dict[str, Any]:
        """Checksums of these tensors as read here, and those that the worker does not compute with."""
        manager, number = self.model_runner.lora_manager, self.ludic_adapters[name]
        served = _served(manager)
        is_active = number in served.lora_index_to_id
        held = _Held(served, served.get_adapter(number), path)
        with safe_open(f"{path}/{ADAPTER_WEIGHTS}", framework="pt") as file:
            read = {tensor: file.get_tensor(tensor) for tensor in tensors}
        return {
            "checksums": {tensor: checksum(values) for tensor, values in read.items()},
            "differing": [tensor for tensor, values in read.items() if not (is_active and held.equals(tensor, values))],
        }


def _served(manager: WorkerLoRAManager) -> LoRAModelManager:
    return manager._adapter_manager


class _Held:
    """The tensors of a loaded adapter, by their names in the file: vLLM packs modules together and multiplies B by the scale."""

    def __init__(self, served: LoRAModelManager, adapter: LoRAModel, path: str) -> None:
        mapper = getattr(served.model, "hf_to_vllm_mapper", None)  # only some models have one
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._config = PEFTHelper.from_local_dir(path, None)
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for module, lora in adapter.loras.items():
            if isinstance(lora.lora_a, list):
                parts = served.packed_modules[module]
                self._pairs |= dict(zip(parts, zip(lora.lora_a, lora.lora_b, strict=True), strict=True))
            else:
                self._pairs[module] = (lora.lora_a, lora.lora_b)

    def equals(self, tensor: str, values: Tensor) -> bool:
        module, is_a = parse_fine_tuned_lora_name(tensor, self._mapper)
        a, b = self._pairs[module]
        if is_a:
            return torch.equal(a, values.to(a))
        _, scale = self._config.get_rank_and_scaling(parse_fine_tuned_lora_name(tensor)[0])
        return torch.equal(b, values.to(b) * scale)
