"""The worker's side of weight and adapter pushes, inside vLLM.

Loaded by `--worker-extension-cls ludic_vllm.inside.worker.WeightSync`, together with `--weight-transfer-config
'{"backend": "ludic"}'`. vLLM's own endpoints (/start_weight_update, /update_weights, /finish_weight_update) then drive
`LudicTransfer`, which reads flat buffers from a file, from shared memory, from the trainer's GPU memory or from a process group;
naming, fusing and sharding stay with vLLM's loader. `WeightSync` and `_AdapterSync` answer the trainer's calls (`/collective_rpc`).
"""

import contextlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.version import __version__

from ludic.util.files import parse_json
from ludic_vllm.inside.reload import (
    LoadsCopies,
    forget_unfinished,
    pack_experts_again,
    repack_tied_heads,
    unloaded_layers,
)
from ludic_vllm.publish.transfer import (
    Bucket,
    Meeting,
    broadcast,
    checksum,
    join,
    open_cuda_block,
    reach_store,
    sampled,
    unpack,
    without_values,
)
from ludic_vllm.versions import release_of

RELEASE = release_of(__version__)
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NUM_COMPARED = 16
"""Compared values of each base weight."""


@dataclass
class _TransferInit(WeightTransferInitInfo):
    """Address of a process group; staged transports need none."""

    backend: str
    host: str
    port: int
    world_size: int
    timeout_s: float


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """One bucket to load."""

    bucket: dict[str, Any]
    """`Bucket.to_json()`."""
    source: dict[str, Any]
    """{"kind": "file", "path"}, {"kind": "shared_memory", "path", "offset", "size"}, {"kind": "cuda_ipc", "block", "offset"} or
    {"kind": "group"}."""


class LudicTransfer(WeightTransferEngine):
    """Reads buckets and passes them to vLLM's layerwise loader."""

    init_info_cls = _TransferInit
    update_info_cls = TransferUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected: dict[str, list[int]] | None = None
        self._plain: Any = None
        """transformers' model, without values."""
        self.checksums: dict[str, int] = {}
        """Checksums of sampled weights at arrival: on a CPU the loader packs matrices, so they cannot be compared later."""
        self.differing: list[str] = []
        """Weights that the model does not hold as received."""
        self._arrived: set[str] = set()
        self._copies: Any = None
        self._vectors: dict[str, Tensor] = {}
        self._group: Any = None
        self._store: Any = None
        self._arrives_on = torch.device("cpu")
        self._block: Tensor | None = None
        """The trainer's GPU memory, open during an update only."""

    # --- vLLM's interface ---

    def init_transfer_engine(self, init_info: _TransferInit) -> None:
        self.shutdown()
        meeting = Meeting(**vars(init_info))
        self._arrives_on = self.device if meeting.backend == "nccl" else torch.device("cpu")
        self._store = reach_store(meeting)
        parallel = self.parallel_config
        worker = int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
        self._group = join(meeting, self._store, rank=1 + worker)

    def start_weight_update(self) -> None:
        self._arrived, self._vectors, self.checksums, self.differing = set(), {}, {}, []
        self._block = None
        with self._configured():
            forget_unfinished(self.model)
            if self.device.type == "cpu":
                pack_experts_again(self.model)
            initialize_layerwise_reload(self.model)
        self._copies = LoadsCopies(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would wait for an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: TransferUpdate) -> None:
        bucket = Bucket.from_json(update_info.bucket)
        weights = self._read(bucket, update_info.source)
        chosen = {part.name for part in sampled(bucket)}
        self.checksums |= {name: checksum(weight) for name, weight in weights if name in chosen}
        self._vectors |= {name: weight.clone() for name, weight in weights if weight.dim() == 1}
        self._arrived |= {name for name, _ in weights}
        with self._configured(), self._copies:
            self.model.load_weights(self._as_in_checkpoints(weights))

    def finish_weight_update(self) -> None:
        missing = sorted(self.parameters().keys() - self._arrived)
        if missing:  # the loader silently leaves an incomplete layer undefined
            raise RuntimeError(f"{len(missing)} weights never arrived: {missing[:3]}")
        stale = unloaded_layers(self._pushed_model())
        with self._configured():
            finalize_layerwise_reload(self.model, self.model_config)
        self._block = self._copies = None
        if self.device.type == "cpu":
            repack_tied_heads(self.model)
        if self.model_config.quantization is None:
            self.differing = self._not_loaded()
        self._vectors = {}
        if stale:
            raise RuntimeError(
                f"vLLM {__version__} cannot replace all weights of a running {type(self.model).__name__}: its loader left "
                f"{len(stale)} layers as they were, such as {', '.join(stale[:3])}; another push ends in the same way"
            )

    def shutdown(self) -> None:
        self._group = self._store = self._block = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 wants it of every engine; Ludic's trainer sends by ludic_vllm.publish."""
        raise NotImplementedError

    # --- parts ---

    def _configured(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if RELEASE.configures_updates else set_current_vllm_config(self.vllm_config)

    def parameters(self) -> dict[str, list[int]]:
        """Names and shapes of all weights that a push must contain."""
        if self.expected is None:
            # vLLM runs some families (OLMo 2) by transformers' classes, which then ask for its settings when they are made.
            with set_current_vllm_config(self.vllm_config):
                self._plain = without_values(self.model_config.hf_config)
            self.expected = {name: list(parameter.shape) for name, parameter in self._plain.named_parameters()}
        return self.expected

    def _pushed_model(self) -> Any:
        """The part of the served model that a push replaces: of one that sees, while its text is trained, the text's layers."""
        text_of = getattr(self.model, "get_language_model", None)
        sees = hasattr(self._plain.config, "vision_config")
        return self.model if sees or text_of is None else text_of()

    def _as_in_checkpoints(self, weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """A mixture's experts under the names that its checkpoints have, one tensor for each expert, which vLLM's loader reads;
        transformers holds those of a layer as one."""
        if not any(len(shape) == 3 for shape in self.parameters().values()):
            return weights
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self._plain, dict(weights)).items())

    def _read(self, bucket: Bucket, source: dict[str, Any]) -> list[tuple[str, Tensor]]:
        if source["kind"] == "file":
            with safe_open(source["path"], framework="pt") as file:
                return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - not a dict
        if source["kind"] == "shared_memory":
            whole = torch.from_file(source["path"], shared=False, size=source["size"], dtype=torch.uint8)
            return unpack(bucket, whole[source["offset"] : source["offset"] + bucket.num_bytes])
        if source["kind"] == "cuda_ipc":
            if self._block is None:
                self._block = open_cuda_block(source["block"], self.device)
            return unpack(bucket, self._block[source["offset"] : source["offset"] + bucket.num_bytes])
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._arrives_on)
        broadcast(self._group, flat)
        return unpack(bucket, flat)

    def _not_loaded(self) -> list[str]:
        """Vectors (norms) keep name and shape in vLLM's model, so they show whether the loader did its work."""
        held = dict(self.model.named_parameters())
        return sorted(
            name
            for name, weight in self._vectors.items()
            if name in held
            and held[name].shape == weight.shape
            and not torch.equal(held[name].data, weight.to(held[name]))
        )


WeightTransferEngineFactory.register_engine("ludic", LudicTransfer)


class _AdapterSync:
    """Adapter pushes, in a vLLM that was started with --enable-lora.

    vLLM's API server knows an adapter by name, number and path, and every request carries these three. Its own replacement,
    `load_inplace`, is carried by every later request too: the worker then reads the files again at each step, and a request
    that began earlier continues with the old files, whatever its reported version. So vLLM's endpoint registers an adapter
    once, and this code replaces it under its number. `/collective_rpc` converts all results but lists and dicts to text.
    """

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
        _require_readable_patterns(path)
        manager = self.model_runner.lora_manager
        adapter, served = manager._load_adapter(LoRARequest("ludic", 1, path)), manager._adapter_manager
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
        served, number = self.model_runner.lora_manager._adapter_manager, self.ludic_adapters[name]
        is_active = number in served.lora_index_to_id
        held = _Held(served, served.get_adapter(number), path)
        with safe_open(f"{path}/{ADAPTER_WEIGHTS}", framework="pt") as file:
            read = {tensor: file.get_tensor(tensor) for tensor in tensors}
        return {
            "checksums": {tensor: checksum(values) for tensor, values in read.items()},
            "differing": [tensor for tensor, values in read.items() if not (is_active and held.equals(tensor, values))],
        }


class _Held:
    """The tensors of a loaded adapter, by their names in the file: vLLM packs modules together and multiplies B by the scale."""

    def __init__(self, served: LoRAModelManager, adapter: LoRAModel, path: str) -> None:
        mapper = getattr(served.model, "hf_to_vllm_mapper", None)  # only some models have one
        self._mapper = None if mapper is None else getattr(mapper, RELEASE.rename_mapper)()
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
        scale = self._config.vllm_lora_scaling_factor
        if RELEASE.reads_lora_patterns:
            _, scale = self._config.get_rank_and_scaling(parse_fine_tuned_lora_name(tensor)[0])
        return torch.equal(b, values.to(b) * scale)


def _require_readable_patterns(path: str) -> None:
    """An older vLLM would scale all modules of an adapter alike, without a word."""
    config = parse_json((Path(path) / "adapter_config.json").read_text())
    if not RELEASE.reads_lora_patterns and (config.get("rank_pattern") or config.get("alpha_pattern")):
        raise ValueError(
            f"vLLM {__version__} ignores the adapter's rank_pattern and alpha_pattern; publish merged weights."
        )


class WeightSync(_AdapterSync):
    """Mixed into vLLM's worker; `/collective_rpc` can call each method."""

    device: torch.device
    weight_transfer_engine: LudicTransfer
    _weight_update_active: bool

    def ludic_parameters(self, is_push: bool = False) -> dict[str, list[int]]:
        """{name: shape} of all weights that a push must contain. `is_push`: they are going to be pushed."""
        if is_push and not RELEASE.loads_beside_lora and self.vllm_config.lora_config is not None:
            raise ValueError(
                f"vLLM {__version__} cannot load all weights while LoRA is on: push the adapter, or leave --enable-lora out"
            )
        return self.weight_transfer_engine.parameters()

    def ludic_unreadable(self, paths: list[str]) -> list[str]:
        """The files that this worker cannot read."""
        return [path for path in paths if not os.access(path, os.R_OK)]

    def ludic_unmappable(self, block: dict[str, Any]) -> list[str]:
        """Why this worker cannot map the trainer's GPU memory; empty if it can."""
        try:
            open_cuda_block(block, self.device)
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must hear it before the pause
            return [f"{type(error).__name__}: {error}"]
        return []

    def ludic_forget_update(self) -> None:
        """Clear an unfinished update, which would block every later one."""
        self._weight_update_active = False

    def ludic_received(self) -> dict[str, Any]:
        """Checksums and differences of the last update."""
        engine = self.weight_transfer_engine
        return {"checksums": engine.checksums, "differing": engine.differing}
