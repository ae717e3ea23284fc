"""Activation offload: what a forward pass saves for its backward pass waits in host memory.

Each saved storage is copied to pinned memory on a separate CUDA stream while the next layers compute, and copied back ahead of
its use in backward. Values are copied bit for bit, so results do not change. On a CPU the same code runs with plain copies:
nothing is saved there, but tests see every step. `TrainedPolicy` calls it; with recomputation only layer inputs are moved.
"""

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_SLAB = 2 << 30
"""Bytes of pinned memory taken at a time; a power of two, which torch does not round up."""
_MIN_BYTES = 1 << 20
"""Smaller tensors stay on the GPU: a copy costs more than it frees."""
_IN_FLIGHT = 1 << 30
"""Bytes whose copy to the host the computation does not wait for yet, and bytes copied back ahead of their use."""
_ALIGNMENT = 512


class ActivationOffload:
    """The copy stream and the pinned memory of one model."""

    def __init__(self, device: torch.device, *, min_bytes: int | None = None, slab_bytes: int = _SLAB) -> None:
        self.device = device
        self.min_bytes = min_bytes if min_bytes is not None else _MIN_BYTES if device.type == "cuda" else 0
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []

    def tape(self, *num_tokens: int) -> "HostTape":
        """For one forward pass over tensors with a dimension of one of these sizes: flat tokens, or tokens of a row."""
        return HostTape(self, frozenset(num_tokens))

    def take(self, num_bytes: int) -> tuple["_Slab", int]:
        """A slab with room, and where that is. The slab counts the user; `_Moved` signs off."""
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        slab = next((slab for slab in self._slabs if slab.end + num_bytes <= len(slab.memory)), None)
        if slab is None:
            size = max(self._slab_bytes, 1 << (num_bytes - 1).bit_length())
            slab = _Slab(torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None))
            self._slabs.append(slab)
        start = slab.end
        slab.end += num_bytes
        slab.num_users += 1
        return slab, start

    @property
    def host_bytes(self) -> int:
        """Pinned memory held so far."""
        return sum(len(slab.memory) for slab in self._slabs)


@dataclass(slots=True, eq=False)
class _Slab:
    """Host memory that is filled from the front, and empty again once its last user is gone.

    Copies into it and out of it are on one stream, in order, so it can be filled again without waiting.
    """

    memory: Tensor
    end: int = 0
    num_users: int = 0

    def leave(self) -> None:
        self.num_users -= 1
        if self.num_users == 0:
            self.end = 0


class _Moved:
    """One storage: on the device, on the host, or both. It lives as long as autograd needs one of its tensors."""

    def __init__(self, number: int, version: int, flat: Tensor, offload: ActivationOffload) -> None:
        self.number, self.version, self.num_bytes = number, version, len(flat)
        self.on_device: Tensor | None = flat
        self.arrived: Any = None
        """Event of the copy back, until the computation has waited for it."""
        slab, start = offload.take(self.num_bytes)
        self._slab = slab
        self.on_host = slab.memory[start : start + self.num_bytes]

    def __del__(self) -> None:
        if hasattr(self, "_slab"):
            self._slab.leave()
        if self.arrived is not None:  # never used; the device memory must not be given away before the copy has ended
            torch.cuda.current_stream(self.on_device.device).wait_event(self.arrived)  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class _Saved:
    """The object that autograd holds instead of a tensor."""

    moved: _Moved
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class HostTape:
    """The saved tensors of one forward pass, in the order in which they were saved; backward reads them in reverse."""

    def __init__(self, offload: ActivationOffload, num_tokens: frozenset[int]) -> None:
        self._offload = offload
        self._num_tokens = num_tokens
        self._moved: list[weakref.ref[_Moved]] = []
        self._by_storage: dict[int, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        self._leaving: deque[tuple[weakref.ref[_Moved], int, Any]] = deque()
        self._bytes_leaving = 0

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Whatever autograd saves inside goes through this tape."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> "Tensor | _Saved":
        """Start the copy to the host; a tensor that is not an activation, or a small one, is returned as it is."""
        if not self._is_moved(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # Views of one storage (the input of three projections, halves of a product) are moved once.
        seen = self._by_storage.get(storage._cdata)
        moved = seen[1]() if seen is not None and not seen[0].expired() else None
        if moved is None or moved.version != tensor._version:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            moved = _Moved(len(self._moved), tensor._version, flat, self._offload)
            self._moved.append(weakref.ref(moved))
            self._by_storage[storage._cdata] = StorageWeakRef(storage), weakref.ref(moved)
            self._to_host(moved)
        return _Saved(moved, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def unpack(self, saved: "Tensor | _Saved") -> Tensor:
        """The tensor again, and start copies of what was saved before it."""
        if isinstance(saved, Tensor):
            return saved
        moved = saved.moved
        self._to_device(moved)
        if moved.arrived is not None:
            torch.cuda.current_stream(self._offload.device).wait_event(moved.arrived)
            moved.arrived = None
        self._fetch_ahead(moved.number)
        assert moved.on_device is not None, "it was copied back above"
        view = torch.empty(0, dtype=saved.dtype, device=moved.on_device.device)
        return view.set_(moved.on_device.untyped_storage(), saved.offset, saved.shape, saved.stride)

    def _is_moved(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor and not isinstance(tensor._base, nn.Parameter)
        return (
            is_plain
            and tensor.device == self._offload.device
            and tensor.nbytes >= max(self._offload.min_bytes, 1)
            and not self._num_tokens.isdisjoint(tensor.shape)
        )

    def _to_host(self, moved: _Moved) -> None:
        flat, stream = moved.on_device, self._offload.stream
        assert flat is not None
        if stream is None:
            moved.on_host.copy_(flat)
            moved.on_device = None
            return
        computing = torch.cuda.current_stream(self._offload.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            moved.on_host.copy_(flat, non_blocking=True)
        self._leaving.append((weakref.ref(moved), moved.num_bytes, stream.record_event()))
        self._bytes_leaving += moved.num_bytes
        # The computation waits for older copies, so their memory can be used again; the newest stay for the start of backward.
        while self._bytes_leaving > _IN_FLIGHT and len(self._leaving) > 1:
            oldest, num_bytes, has_left = self._leaving.popleft()
            computing.wait_event(has_left)
            self._bytes_leaving -= num_bytes
            if (gone := oldest()) is not None:
                gone.on_device = None

    def _to_device(self, moved: _Moved) -> None:
        if moved.on_device is not None:
            return
        stream = self._offload.stream
        if stream is None:
            moved.on_device = moved.on_host.clone()
            return
        flat = torch.empty(moved.num_bytes, dtype=torch.uint8, device=self._offload.device)
        stream.wait_stream(torch.cuda.current_stream(self._offload.device))  # the memory may still be in use there
        with torch.cuda.stream(stream):
            flat.copy_(moved.on_host, non_blocking=True)
        moved.on_device, moved.arrived = flat, stream.record_event()

    def _fetch_ahead(self, number: int) -> None:
        ahead = 0
        for earlier in range(number - 1, -1, -1):
            if ahead >= _IN_FLIGHT or self._offload.stream is None:
                return
            if (moved := self._moved[earlier]()) is not None:
                ahead += moved.num_bytes
                self._to_device(moved)
