"""LoRA adapters in slots of stacked matrices, so that one captured graph computes rows of several adapters.

For projections with the same input, A of all slots is one matrix, and so is B. A row is multiplied by all of them; what belongs to
other slots than its own is set to zero between the two products. The buffers stay where they are while adapters come and go, and a
graph reads the slot of each row from the device.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.adapters.forward import PackedAdapter

NO_SLOT = -1
"""The slot of a row without adapter."""
BROKEN = -2
"""The slot of a row whose adapter is not finite. Its results are NaN; the adapter gets no slot, since 0 · NaN reaches all rows."""
_LARGEST = 1e38
"""Below the largest number in bf16 and fp32, by a margin for rounding. Weights in fp16 are checked against its own maximum."""
_LONG = 64
"""Passes. Few slots in use make fast passes, so a new adapter takes an early slot from one that is idle."""


# Letters: T rows, N inputs of a product, M its outputs, P its adapted projections, R the rank, S slots.
class StackedProduct:
    """A and B of every slot for projections with the same input, whose outputs lie side by side."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], weight: Tensor) -> None:
        """`sizes`: outputs of each projection. `weight` [M, N] is only asked for its size, precision and device."""
        self._names, self._sizes, self._weight = names, sizes, weight
        self._a_SRN: Tensor | None = None
        self._b_SRM: Tensor | None = None

    def allocate(self, num_slots: int, rank: int) -> None:
        width = len(self._names) * rank
        self._a_SRN = self._weight.new_zeros(num_slots, width, self._weight.shape[1])
        self._b_SRM = self._weight.new_zeros(num_slots, width, sum(self._sizes))

    def is_adapted_by(self, adapter: PackedAdapter) -> bool:
        return any(adapter.weights(name) is not None for name in self._names)

    @property
    def is_allocated(self) -> bool:
        return self._a_SRN is not None

    def write(self, slot: int, adapter: PackedAdapter, rank: int) -> None:
        """Put the adapter's matrices into a slot that has room for this rank."""
        if self._a_SRN is None or self._b_SRM is None:
            return
        a_RN, b_RM = self._a_SRN[slot].zero_(), self._b_SRM[slot].zero_()
        first = 0
        for number, (name, size) in enumerate(zip(self._names, self._sizes, strict=True)):
            pair = adapter.weights(name)
            if pair is not None:
                own_RN, own_MR = pair
                rows = slice(number * rank, number * rank + len(own_RN))
                a_RN[rows] = own_RN
                b_RM[rows, first : first + size] = own_MR.t() * adapter.scale
            first += size

    def add(self, out_TM: Tensor, x_TN: Tensor, slots_T: Tensor, num_slots: int) -> Tensor:
        """Add what each row's slot gives, in place. Rows have the first `num_slots` slots."""
        if self._a_SRN is None or self._b_SRM is None:
            return out_TM
        width = self._a_SRN.shape[1]
        inner = F.linear(x_TN, self._a_SRN[:num_slots].flatten(0, 1))
        keep_own(inner, slots_T, width)
        return out_TM.addmm_(inner, self._b_SRM[:num_slots].flatten(0, 1))


def keep_own(inner_TK: Tensor, slots_T: Tensor, width: int) -> None:
    """Set to zero what is not in the row's own `width` columns; to NaN the rows of broken adapters. In place."""
    if inner_TK.is_cuda:
        from ludic_gpu.cuda.kernels import keep_own_columns  # imports triton

        keep_own_columns(inner_TK, slots_T, width)
        return
    owner_K = torch.arange(inner_TK.shape[1], device=inner_TK.device) // width
    inner_TK.masked_fill_(owner_K[None] != slots_T[:, None], 0.0)
    inner_TK.masked_fill_((slots_T == BROKEN)[:, None], float("nan"))


class AdapterSlots:
    """The slots of the adapters in use. The number of slots grows to that of the adapters of one pass."""

    def __init__(self, products: Sequence[StackedProduct]) -> None:
        self._products = products
        self._slots: dict[int, int] = {}
        """Slot by the adapter's number."""
        self._broken: set[int] = set()
        """Adapters of the last pass that are not finite."""
        self._last_used: list[int] = []
        """The last pass that used each slot."""
        self._rank = self._pass = 0
        self.generation = 0
        """Grows when buffers are allocated: a graph that was captured before reads others."""

    @torch.no_grad()
    def place(self, adapters: Iterable[PackedAdapter | None]) -> None:
        """Give every adapter of the next pass a slot; others may lose theirs."""
        wanted = {adapter.number: adapter for adapter in adapters if adapter is not None}
        self._pass += 1
        self._broken &= wanted.keys()
        new = [a for number, a in wanted.items() if number not in self._slots and number not in self._broken]
        self._broken |= {a.number for a in new if not a.largest() < min(_LARGEST, torch.finfo(a.dtype).max / 2)}
        if new and self._reserve(new, len(wanted)):
            new = list(wanted.values())
        for number in wanted:
            if number in self._slots:
                self._last_used[self._slots[number]] = self._pass
        for adapter in new:
            if adapter.number not in self._broken:
                self._write(adapter)

    def _write(self, adapter: PackedAdapter) -> None:
        """Into the first slot that is free or was not used for long; else into the one that was not used for longest."""
        idle = [slot for slot, last in enumerate(self._last_used) if last < self._pass - _LONG]
        slot = idle[0] if idle else int(np.argmin(self._last_used))
        self._slots = {number: own for number, own in self._slots.items() if own != slot}
        self._slots[adapter.number], self._last_used[slot] = slot, self._pass
        for product in self._products:
            product.write(slot, adapter, self._rank)

    def _reserve(self, new: list[PackedAdapter], count: int) -> bool:
        """True if buffers had to be allocated, which empties all slots."""
        rank = max(self._rank, *(adapter.rank for adapter in new))
        num_slots = max(len(self._last_used), 1 << (count - 1).bit_length())
        needed = [p for p in self._products if p.is_allocated or any(p.is_adapted_by(adapter) for adapter in new)]
        if rank == self._rank and num_slots == len(self._last_used) and all(p.is_allocated for p in needed):
            return False
        for product in needed:
            product.allocate(num_slots, rank)
        self._rank, self._slots, self._last_used = rank, {}, [-_LONG - 1] * num_slots
        self.generation += 1
        return True

    def of(self, adapters: Iterable[PackedAdapter | None]) -> np.ndarray:
        """The slot of each adapter that was placed last, NO_SLOT without one."""
        return np.array([NO_SLOT if a is None else self._slots.get(a.number, BROKEN) for a in adapters], dtype=np.int32)

    def num_used(self, slots: np.ndarray) -> int:
        """The number of slots that a pass over rows with these slots must compute: a power of two, 0 if no row has an adapter."""
        if not np.any(slots != NO_SLOT):
            return 0
        return 1 << int(max(slots.max(), 0)).bit_length()
