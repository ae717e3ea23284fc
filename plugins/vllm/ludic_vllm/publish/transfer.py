"""Shared by trainer and vLLM workers for a weight push: flat buffers of weights, and a process group to send them.

The trainer's side is vllm.py, the worker's side ludic_vllm.inside.worker. This file also runs inside the server: torch,
transformers and the standard library only.
"""

import base64
import copy
import math
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 64
"""Every weight begins at a multiple of this, so that it can be viewed in its own dtype."""
CHECKSUM_BYTES = 1 << 20
"""The checksum of a larger weight covers this many bytes, half from its start and half from its end."""
NUM_SAMPLED = 8
"""Weights per bucket whose checksums are compared."""


@dataclass(frozen=True, slots=True)
class WeightMetadata:
    """One weight, without its values."""

    name: str
    """transformers' name; fusing and sharding are up to the server."""
    dtype: str
    """dtype of the sent values, by torch's name ("bfloat16"). The server casts to its own."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """The offsets of several weights in one flat buffer."""

    weights: tuple[WeightMetadata, ...]
    offsets: tuple[int, ...]
    """First byte of each weight."""
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        rows = zip(self.weights, self.offsets, strict=True)
        return {
            "weights": [[w.name, w.dtype, list(w.shape), offset] for w, offset in rows],
            "num_bytes": self.num_bytes,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Bucket":
        rows = body["weights"]
        return cls(
            weights=tuple(WeightMetadata(name, dtype, tuple(shape)) for name, dtype, shape, _ in rows),
            offsets=tuple(offset for *_, offset in rows),
            num_bytes=body["num_bytes"],
        )


def describe(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[WeightMetadata]:
    """Metadata sorted by name: the parts of a layer stay together, and the server fuses a layer when it is complete."""
    metadata = []
    for name, weight in sorted(weights.items()):
        sent_as = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
        metadata.append(WeightMetadata(name, str(sent_as).removeprefix("torch."), tuple(weight.shape)))
    return metadata


def split_into_buckets(metadata: Sequence[WeightMetadata], max_bytes: int) -> list[Bucket]:
    """Split in order; a weight larger than `max_bytes` gets a bucket alone."""
    buckets: list[Bucket] = []
    inside: list[WeightMetadata] = []
    offsets: list[int] = []
    end = 0
    for weight in metadata:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if inside and offset + weight.num_bytes > max_bytes:
            buckets.append(Bucket(tuple(inside), tuple(offsets), end))
            inside, offsets, offset = [], [], 0
        inside.append(weight)
        offsets.append(offset)
        end = offset + weight.num_bytes
    if inside:
        buckets.append(Bucket(tuple(inside), tuple(offsets), end))
    return buckets


@torch.no_grad()
def pack(bucket: Bucket, weights: Mapping[str, Tensor], flat: Tensor) -> None:
    """Copy (and cast) each weight to its place in `flat`, a one-dimensional uint8 tensor on any device."""
    for part, view in _views(bucket, flat):
        view.copy_(weights[part.name])


def unpack(bucket: Bucket, flat: Tensor) -> list[tuple[str, Tensor]]:
    """(name, view into `flat`); the views keep `flat` alive."""
    return [(part.name, view) for part, view in _views(bucket, flat)]


def _views(bucket: Bucket, flat: Tensor) -> Iterator[tuple[WeightMetadata, Tensor]]:
    for part, offset in zip(bucket.weights, bucket.offsets, strict=True):
        yield part, flat[offset : offset + part.num_bytes].view(part.torch_dtype).view(part.shape)


def sampled(bucket: Bucket) -> list[WeightMetadata]:
    """A few evenly spread weights, the first and the last included; both sides choose the same."""
    last = len(bucket.weights) - 1
    chosen = {round(i * last / (NUM_SAMPLED - 1)) for i in range(NUM_SAMPLED)}
    return [bucket.weights[i] for i in sorted(chosen)]


def checksum(weight: Tensor) -> int:
    """CRC-32 of the bytes; equal on both sides exactly if the same values arrived in the same dtype."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > CHECKSUM_BYTES:
        half = CHECKSUM_BYTES // 2
        flat = torch.cat([flat[:half], flat[-half:]])
    return zlib.crc32(flat.cpu().numpy().data)


# --- a block of GPU memory that both sides see (CUDA IPC) ---

_HANDLES = ("handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")


def share_cuda_block(flat: Tensor) -> dict[str, Any]:
    """The handle, as JSON, of `flat`, a one-dimensional uint8 tensor on a GPU, for another process; valid while `flat` lives."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(flat)
    *_, handle, size, offset, _, counter, counter_offset, event, event_sync = arguments
    texts = (base64.b64encode(part).decode() for part in (handle, counter, event))
    numbers = (size, offset, counter_offset, event_sync)
    return {
        "gpu": gpu_identity(flat.device),
        "num_bytes": flat.numel(),
        **dict(zip(_HANDLES, texts, strict=True)),
        **dict(zip(_NUMBERS, map(int, numbers), strict=True)),
    }


def open_cuda_block(block: Mapping[str, Any], device: torch.device) -> Tensor:
    """The other process's block. Mapped until the returned tensor and its views are gone."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    ours = gpu_identity(device)
    if ours != block["gpu"]:
        raise ValueError(f"the trainer's weights are on GPU {block['gpu']}, this worker on {ours}")
    handle, counter, event = (base64.b64decode(block[name]) for name in _HANDLES)
    size, offset, counter_offset, event_sync = (block[name] for name in _NUMBERS)
    index = device.index if device.index is not None else torch.cuda.current_device()
    opened: Tensor = rebuild_cuda_tensor(
        Tensor, (block["num_bytes"],), (1,), 0, torch.storage.TypedStorage, torch.uint8, index,
        handle, size, offset, False, counter, counter_offset, event, bool(event_sync),
    )  # fmt: skip
    return opened


def gpu_identity(device: torch.device) -> str:
    """The GPU's number is another in a process with another CUDA_VISIBLE_DEVICES; this is not."""
    return str(torch.cuda.get_device_properties(device).uuid)


# --- the process group ---


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address and settings of a process group of one trainer and the workers of one server, separate from each side's own groups.

    The trainer is rank 0 and holds the store through which the workers find it. gloo moves host memory over TCP; nccl moves
    GPU memory.
    """

    backend: str
    """"gloo" or "nccl"."""
    host: str
    """The trainer's address, as the server reaches it."""
    port: int
    world_size: int
    """The trainer and every worker of the server."""
    timeout_s: float
    """For joining, and for each transfer."""


def open_store(host: str, world_size: int, timeout_s: float) -> Any:
    """The trainer's store, on a free port of this address; the workers need `store.port`."""
    listener = socket.create_server((host, 0))
    store = dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # the store closes it
    return store


def reach_store(meeting: Meeting) -> Any:
    """A worker's connection to the trainer's store."""
    timeout = timedelta(seconds=meeting.timeout_s)
    return dist.TCPStore(meeting.host, meeting.port, meeting.world_size, False, timeout=timeout, wait_for_workers=False)


def join(meeting: Meeting, store: Any, rank: int) -> Any:
    """Join the group; returns when all ranks have joined."""
    timeout = timedelta(seconds=meeting.timeout_s)
    inside = dist.PrefixStore("ludic", store)
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(inside, rank, meeting.world_size, options)
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
    options = gloo._Options()
    options._timeout = timeout
    # Without this gloo listens on the address of the host's own name, which may not resolve in a container.
    options._devices = [gloo.create_device(hostname=address_towards(meeting.host))]
    return gloo(inside, rank, meeting.world_size, options)


def broadcast(group: Any, flat: Tensor) -> None:
    """Send from the trainer to all workers; returns when complete."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def address_towards(host: str) -> str:
    """The address of this machine that `host` would see. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address


def without_values(config: Any) -> Any:
    """transformers' (and so the trainer's) model of this config. Takes no memory.

    The class is the one that `ludic.models.loading` chooses: of text where transformers has one, else of text and pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in {"default", *ROPE_INIT_FUNCTIONS}:  # vLLM renames DeepSeek's
        config = copy.copy(config)
        config.rope_parameters = {**rope, "rope_type": "default"}
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    with torch.device("meta"):
        return (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(config)
