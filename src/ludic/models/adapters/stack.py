"""Adapters of one shape side by side, so that a batched product serves the few rows of each.

A decoding step with one sequence per adapter would spend its time on the overhead of many small products. The batched product gives
a row the same result, bit for bit, as one for its adapter alone.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ludic.models.adapters.forward import PackedAdapter

MAX_ROWS = 8
"""Rows of an adapter up to which it takes part: with more, its products alone are as fast."""
_MAX_SLOTS = 16


class AdapterStack:
    """Copies of adapters of one shape in slots. An adapter keeps its slot until it is deleted, or used least recently of all
    when another needs one."""

    def __init__(self) -> None:
        self._owners: list[weakref.ref[PackedAdapter]] = []
        self._last_use: list[int] = []
        self._num_uses = 0
        self._copies: dict[tuple[str, ...], _Copies] = {}

    def place(self, adapters: Sequence["PackedAdapter"]) -> list[int] | None:
        """The slot of each; None if there are too few slots, or if too many between them belong to others."""
        if len(adapters) > _MAX_SLOTS:
            return None
        self._num_uses += 1
        slots = {owner(): slot for slot, owner in enumerate(self._owners)}
        for adapter in adapters:
            if adapter in slots:
                self._last_use[slots[adapter]] = self._num_uses
        for adapter in adapters:
            if adapter not in slots:
                slots[adapter] = self._take(adapter)
        found = [slots[adapter] for adapter in adapters]
        return found if max(found) - min(found) < 2 * len(found) else None

    def _take(self, adapter: "PackedAdapter") -> int:
        """The first slot without an owner, a new one, or the one used least recently."""
        slot = next((slot for slot, owner in enumerate(self._owners) if owner() is None), len(self._owners))
        if slot == len(self._owners) and slot < _MAX_SLOTS:
            self._owners.append(weakref.ref(adapter))
            self._last_use.append(0)
        elif slot == len(self._owners):
            slot = min(range(slot), key=self._last_use.__getitem__)
        self._owners[slot], self._last_use[slot] = weakref.ref(adapter), self._num_uses
        return slot

    def copies(self, names: tuple[str, ...], adapters: Sequence["PackedAdapter"], slots: Sequence[int]) -> "_Copies":
        """A and B of projections with the same input, with those of these adapters in these slots."""
        found = self._copies.get(names)
        if found is None or found.num_slots < len(self._owners):
            found = self._copies[names] = _Copies(1 << (len(self._owners) - 1).bit_length())
        for adapter, slot in zip(adapters, slots, strict=True):
            if found.numbers[slot] != adapter.number:
                found.put(slot, names, adapter)
        return found


# Letters: S slots, n rows of each, N inputs of a projection, M its outputs, R the rank.
class _Copies:
    """A [S, N, sum of R] and B [S, R, M] of projections with the same input."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.numbers = [0] * num_slots
        """Of the adapter whose copy is in the slot."""
        self.a_SNR: Tensor | None = None
        """None while no adapter adapts these projections."""
        self.scaled: list[tuple[int, Tensor]] = []
        """(Place among the projections, B)."""

    def put(self, slot: int, names: tuple[str, ...], adapter: "PackedAdapter") -> None:
        self.numbers[slot] = adapter.number
        joined = adapter.joined(names)
        if joined is None:
            return
        a_NR, scaled = joined
        if self.a_SNR is None:
            self.a_SNR = a_NR.new_zeros(self.num_slots, *a_NR.shape)
            self.scaled = [(place, b_RM.new_zeros(self.num_slots, *b_RM.shape)) for place, b_RM in scaled]
        self.a_SNR[slot] = a_NR
        for (_, b_SRM), (_, b_RM) in zip(self.scaled, scaled, strict=True):
            b_SRM[slot] = b_RM


class StackedRows:
    """A few rows of each of several adapters of one shape."""

    def __init__(
        self,
        stack: AdapterStack,
        adapters: Sequence["PackedAdapter"],
        slots: Sequence[int],
        rows: Sequence[list[int]],
        device: torch.device | None,
        min_rows: int,
    ) -> None:
        self._stack, self._adapters, self._slots = stack, adapters, slots
        self._num_rows = max(min_rows, *map(len, rows))
        self._range = slice(min(slots), max(slots) + 1)
        # A row that is there twice is computed twice, with one result; what slots of others give is dropped.
        index = [[rows[0][0]] * self._num_rows for _ in range(self._range.stop - self._range.start)]
        for slot, own in zip(slots, rows, strict=True):
            index[slot - self._range.start] = own + own[:1] * (self._num_rows - len(own))
        self._index = torch.tensor(index, device=device).flatten()
        kept = [slot - self._range.start for slot in slots]
        self._kept: Tensor | None = None
        if len(kept) < len(index):
            self._kept = torch.tensor(kept, device=device)
            self._kept_index = torch.tensor([index[slot] for slot in kept], device=device).flatten()

    def add(self, out_TM: Tensor, x_TN: Tensor, names: tuple[str, ...], sizes: Sequence[int]) -> None:
        """Add what each row's adapter gives."""
        copies = self._stack.copies(names, self._adapters, self._slots)
        if copies.a_SNR is None:
            return
        shape = -1, self._num_rows
        x_SnN, out_SnM = (t.index_select(0, self._index).view(*shape, t.shape[1]) for t in (x_TN, out_TM))
        x_SnR = torch.bmm(x_SnN, copies.a_SNR[self._range])
        rank = copies.scaled[0][1].shape[1]
        for number, (place, b_SRM) in enumerate(copies.scaled):
            start = sum(sizes[:place])
            inner = x_SnR[:, :, number * rank : (number + 1) * rank]
            out_SnM[:, :, start : start + sizes[place]].baddbmm_(inner, b_SRM[self._range])
        if self._kept is None:
            out_TM.index_copy_(0, self._index, out_SnM.flatten(0, 1))
        else:
            out_TM.index_copy_(0, self._kept_index, out_SnM.index_select(0, self._kept).flatten(0, 1))
