"""The worker's side of a weight push, inside vLLM.

Loaded by `--worker-extension-cls ludic.inference.vllm.worker.weights.WeightSync`, together with `--weight-transfer-config
'{"backend": "ludic"}'`. vLLM's own endpoints (/start_weight_update, /update_weights, /finish_weight_update) then drive
`LudicTransfer`, which reads flat buffers from a file, from shared memory or from a process group; naming, fusing and
sharding stay with vLLM's loader. `WeightSync` answers the trainer's calls (`/collective_rpc`).
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from ludic.inference.vllm.buckets import Bucket, checksum, sampled, unpack
from ludic.inference.vllm.worker.group import Meeting, broadcast, join, reach_store
from ludic.inference.vllm.worker.lora import AdapterSync


@dataclass
class TransferInit(WeightTransferInitInfo):
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
    """{"kind": "file", "path"}, {"kind": "shared_memory", "path", "offset", "size"} or {"kind": "group"}."""


class LudicTransfer(WeightTransferEngine):
    """Reads buckets and passes them to vLLM's layerwise loader."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected: dict[str, list[int]] | None = None
        self.checksums: dict[str, int] = {}
        """Of sampled weights at arrival: on a CPU the loader packs matrices, so they cannot be compared later."""
        self.differing: list[str] = []
        """Weights that the model does not hold as received."""
        self._arrived: set[str] = set()
        self._vectors: dict[str, Tensor] = {}
        self._group: Any = None
        self._store: Any = None
        self._arrives_on = torch.device("cpu")

    # --- vLLM's interface ---

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        self.shutdown()
        meeting = Meeting(**vars(init_info))
        self._arrives_on = self.device if meeting.backend == "nccl" else torch.device("cpu")
        self._store = reach_store(meeting)
        self._group = join(meeting, self._store, rank=1 + self._worker_rank())

    def start_weight_update(self) -> None:
        self._arrived, self._vectors, self.checksums, self.differing = set(), {}, {}, []
        forget_unfinished(self.model)
        initialize_layerwise_reload(self.model)

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
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        missing = sorted(self.parameters().keys() - self._arrived)
        if missing:  # the loader silently leaves an incomplete layer undefined
            raise RuntimeError(f"{len(missing)} weights never arrived: {missing[:3]}")
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)
        if self.model_config.quantization is None:
            self.differing = self._not_loaded()
        self._vectors = {}

    def shutdown(self) -> None:
        self._group = self._store = None

    # --- parts ---

    def parameters(self) -> dict[str, list[int]]:
        """Names and shapes of all weights that a push must contain."""
        if self.expected is None:
            self.expected = checkpoint_parameters(self.model_config.hf_config)
        return self.expected

    def _read(self, bucket: Bucket, source: dict[str, Any]) -> list[tuple[str, Tensor]]:
        if source["kind"] == "file":
            return read_file(source["path"])
        if source["kind"] == "shared_memory":
            whole = torch.from_file(source["path"], shared=False, size=source["size"], dtype=torch.uint8)
            return unpack(bucket, whole[source["offset"] : source["offset"] + bucket.num_bytes])
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._arrives_on)
        broadcast(self._group, flat)
        return unpack(bucket, flat)

    def _worker_rank(self) -> int:
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

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


class WeightSync(AdapterSync):
    """Mixed into vLLM's worker; `/collective_rpc` can call each method."""

    weight_transfer_engine: LudicTransfer
    _weight_update_active: bool

    def ludic_parameters(self) -> dict[str, list[int]]:
        """{name: shape} of all weights that a push must contain."""
        return self.weight_transfer_engine.parameters()

    def ludic_unreadable(self, paths: list[str]) -> list[str]:
        """The files that this worker cannot read."""
        return [path for path in paths if not os.access(path, os.R_OK)]

    def ludic_forget_update(self) -> None:
        """Clear an unfinished update, which would block every later one."""
        self._weight_update_active = False

    def ludic_received(self) -> dict[str, Any]:
        """Checksums and differences of the last update."""
        engine = self.weight_transfer_engine
        return {"checksums": engine.checksums, "differing": engine.differing}


def checkpoint_parameters(config: Any) -> dict[str, list[int]]:
    """Names and shapes as transformers (and so the trainer) has them, tied weights once. Takes no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def read_file(path: str) -> list[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - not a dict


def forget_unfinished(model: nn.Module) -> None:
    """Undo a broken update: its queued or half-loaded weights would be taken for parts of this one."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()


def repack_tied_heads(model: nn.Module) -> None:
    """On a CPU a head tied to the embedding computes with a packed copy, which the loader does not update."""
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    embeddings = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    tables = {layer.weight.data_ptr() for layer in embeddings if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in tables:
            head.quant_method.process_weights_after_loading(head)


WeightTransferEngineFactory.register_engine("ludic", LudicTransfer)
