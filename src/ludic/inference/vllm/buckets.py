"""How weights travel to a server: flat buffers of bytes, and a list of what lies where in them.

The trainer's side (ludic.distributed) fills them, the worker's side (ludic.inference.vllm.worker.weights) reads them. Both
import this file, so they cannot disagree. It runs inside the server too: torch and the standard library only.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every weight begins at a multiple of this, so that a view of its own type can be taken."""
CHECKSUM_BYTES = 1 << 20
"""A larger weight is judged by this many bytes, half from its head and half from its tail."""
NUM_SAMPLED = 8
"""Weights per bucket whose checksums are compared."""


@dataclass(frozen=True, slots=True)
class WeightMetadata:
    """One weight, without its values."""

    name: str
    """As transformers names it; fusing and sharding are the server's business."""
    dtype: str
    """Type of the values on the way, by torch's name for it ("bfloat16"). The server casts to its own."""
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
    """Where each of several weights lies in one flat buffer."""

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
    """Sorted by name: the parts of a layer stay together, and the server fuses a layer when it is complete."""
    return [_describe(name, weights[name], dtype) for name in sorted(weights)]


def _describe(name: str, weight: Tensor, dtype: torch.dtype | None) -> WeightMetadata:
    on_the_way = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
    return WeightMetadata(name, str(on_the_way).removeprefix("torch."), tuple(weight.shape))


def split_into_buckets(metadata: Sequence[WeightMetadata], max_bytes: int) -> list[Bucket]:
    """In order; a weight larger than `max_bytes` has a bucket of its own."""
    buckets: list[Bucket] = []
    inside: list[WeightMetadata] = []
    offsets: list[int] = []
    end = 0
    for weight in metadata:
        offset = _aligned(end)
        if inside and offset + weight.num_bytes > max_bytes:
            buckets.append(Bucket(tuple(inside), tuple(offsets), end))
            inside, offsets, offset = [], [], 0
        inside.append(weight)
        offsets.append(offset)
        end = offset + weight.num_bytes
    if inside:
        buckets.append(Bucket(tuple(inside), tuple(offsets), end))
    return buckets


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def pack(bucket: Bucket, weights: Mapping[str, Tensor], flat: Tensor) -> None:
    """Copy (and cast) each weight to its place in `flat`, a one-dimensional uint8 tensor on any device."""
    for part, view in _views(bucket, flat):
        view.copy_(weights[part.name])


def unpack(bucket: Bucket, flat: Tensor) -> list[tuple[str, Tensor]]:
    """(name, view into `flat`): as long as one of them is used, `flat` lives."""
    return [(part.name, view) for part, view in _views(bucket, flat)]


def _views(bucket: Bucket, flat: Tensor) -> Iterator[tuple[WeightMetadata, Tensor]]:
    for part, offset in zip(bucket.weights, bucket.offsets, strict=True):
        yield part, flat[offset : offset + part.num_bytes].view(part.torch_dtype).view(part.shape)


def sampled(bucket: Bucket) -> list[WeightMetadata]:
    """A few weights, spread over all of them; both sides choose the same. The first and the last are always among them."""
    last = len(bucket.weights) - 1
    chosen = {round(i * last / (NUM_SAMPLED - 1)) for i in range(NUM_SAMPLED)}
    return [bucket.weights[i] for i in sorted(chosen)]


def checksum(weight: Tensor) -> int:
    """CRC-32 of the bytes; equal on both sides exactly when the same values arrived in the same type."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > CHECKSUM_BYTES:
        half = CHECKSUM_BYTES // 2
        flat = torch.cat([flat[:half], flat[-half:]])
    return zlib.crc32(flat.cpu().numpy().data)
