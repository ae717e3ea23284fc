"""The inference engine's forward pass over tokens of several adapters: from token ids to the requested logits.

It is one of the passes of `ludic.models.forward`, whose linear layers add to their product what each row's adapter gives.
Projections with the same input share one product with A. Rows of an adapter are computed two at least, so that a row has the
same result, bit for bit, whatever other rows are in the pass (if the shared products keep it, `Forward.keeps_rows`).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ludic.models.adapters.adapter import LoraAdapter, adaptable_linears
from ludic.models.attention import AttentionState
from ludic.models.forward import Forward, FusedLlama, Layout, PackedLinear, make_forward
from ludic.types import ConfigError

MIN_ROWS = 2
"""A product with a single row takes another path through the math library, and rounds in another way."""


# Letters: T flat tokens, N inputs of a projection, M its outputs, R the rank.
class PackedAdapter:
    """A frozen adapter in the layout and precision of products with few rows: transposed, scale included."""

    _numbers = itertools.count(1)

    def __init__(self, adapter: LoraAdapter, dtype: torch.dtype) -> None:
        """An adapter that can be trained is copied."""
        self.number = next(self._numbers)
        """No other adapter of this process has it."""
        self._adapter = adapter.copy() if any(p.requires_grad for p in adapter.parameters()) else adapter
        self.dtype = dtype
        self._joined: dict[tuple[str, ...], tuple[Tensor, list[tuple[int, Tensor]]] | None] = {}

    @property
    def rank(self) -> int:
        return self._adapter.spec.rank

    @property
    def scale(self) -> float:
        return self._adapter.scale

    def weights(self, name: str) -> tuple[Tensor, Tensor] | None:
        """A [R, N] and B [M, R] of a projection in fp32, without the scale; None if it is not adapted."""
        return self._adapter.weights(name)

    def largest(self) -> float:
        """The largest weight, times the scale where that is above 1. NaN if there is one."""
        return float(self._adapter.flat.abs().max()) * max(1.0, abs(self.scale))

    @torch.no_grad()
    def joined(self, names: tuple[str, ...]) -> tuple[Tensor, list[tuple[int, Tensor]]] | None:
        """A of all projections with the same input [N, sum of R], and (its place among `names`, B [R, M]) of each adapted one; None
        if none of them is."""
        if names not in self._joined:
            pairs = [(place, self._adapter.weights(name)) for place, name in enumerate(names)]
            found = [(place, *pair) for place, pair in pairs if pair is not None]
            if found:
                a_NR = torch.cat([a_RN for _, a_RN, _ in found]).t().to(self.dtype).contiguous()
                scaled = [
                    (place, (b_MR.t() * self._adapter.scale).to(self.dtype).contiguous()) for place, _, b_MR in found
                ]
                self._joined[names] = a_NR, scaled
            else:
                self._joined[names] = None
        return self._joined[names]

    def add(self, out_TM: Tensor, x_TN: Tensor, names: tuple[str, ...], sizes: Sequence[int]) -> None:
        """Add what the adapter gives for these rows; `sizes` are the outputs of each projection, side by side in `out_TM`."""
        joined = self.joined(names)
        if joined is None:
            return
        a_NR, scaled = joined
        x_TR = x_TN @ a_NR
        rank = scaled[0][1].shape[0]
        for number, (place, b_RM) in enumerate(scaled):
            start = sum(sizes[:place])
            inner = x_TR[:, number * rank : (number + 1) * rank]
            out_TM[:, start : start + sizes[place]].addmm_(inner, b_RM)


AdapterRows = Sequence[tuple[PackedAdapter | None, int]]
"""(adapter, number of rows) in the order of the rows; None is the base model."""


class _RowPlan:
    """The adapters of the rows of a pass."""

    def __init__(self, rows: AdapterRows = (), device: torch.device | None = None) -> None:
        self._device = device
        self._ranges: dict[PackedAdapter, list[range]] = {}
        start = 0
        for adapter, count in rows:
            if adapter is not None and count:
                self._ranges.setdefault(adapter, []).append(range(start, start + count))
            start += count
        self._num_rows = start
        self._parts: dict[tuple[int, int], list[tuple[PackedAdapter, slice | Tensor]]] = {}

    def select(self, where: Sequence[int]) -> "_RowPlan":
        """The plan of these rows, in this order."""
        owners: list[PackedAdapter | None] = [None] * self._num_rows
        for adapter, ranges in self._ranges.items():
            for own in ranges:
                owners[own.start : own.stop] = [adapter] * len(own)
        return _RowPlan([(owners[row], 1) for row in where], self._device)

    def add(self, out_TM: Tensor, x_TN: Tensor, names: tuple[str, ...], sizes: Sequence[int], first: int) -> None:
        """Add the product of each row's adapter to the product of the rows from `first` on."""
        for adapter, rows in self._part(first, first + len(x_TN)):
            if isinstance(rows, slice):
                adapter.add(out_TM[rows], x_TN[rows], names, sizes)
            elif adapter.joined(names) is not None:
                own_TM = out_TM.index_select(0, rows)
                adapter.add(own_TM, x_TN.index_select(0, rows), names, sizes)
                out_TM.index_copy_(0, rows, own_TM)

    def _part(self, first: int, end: int) -> list[tuple[PackedAdapter, slice | Tensor]]:
        """The adapters of rows `first` … `end`, and where each one's rows are among these."""
        if (first, end) not in self._parts:
            rows = {
                adapter: [row - first for r in ranges for row in range(max(r.start, first), min(r.stop, end))]
                for adapter, ranges in self._ranges.items()
            }
            self._parts[first, end] = [(adapter, self._places(own)) for adapter, own in rows.items() if own]
        return self._parts[first, end]

    def _places(self, own: list[int]) -> slice | Tensor:
        if len(own) >= MIN_ROWS and own[-1] - own[0] == len(own) - 1:
            return slice(own[0], own[-1] + 1)
        # A row that is there twice is computed twice, with one result.
        return torch.tensor(own + own[: MIN_ROWS - len(own)], device=self._device)


class _Pass:
    """The plans of the current pass: for its tokens, and for the positions whose logits are requested."""

    def __init__(self) -> None:
        self.tokens = self.positions = _RowPlan()


class _AdaptedLinear(PackedLinear):
    """Linear layers with the same input, packed or as they are, and the adapters of the current pass."""

    def __init__(
        self, names: tuple[str, ...], current: _Pass, is_head: bool, *linears: nn.Linear, layout: Layout | None = None
    ) -> None:
        super().__init__(*linears, layout=layout)
        self._names, self._sizes = names, [linear.out_features for linear in linears]
        self._current, self._is_head = current, is_head

    def forward(self, x: Tensor, first_row: int = 0) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        out = super().forward(flat)
        plan = self._current.positions if self._is_head else self._current.tokens
        plan.add(out, flat, self._names, self._sizes, first_row)
        return out.view(*x.shape[:-1], self.out_features)


class AdaptedForward:
    """`Forward` with adapters. Call `use` before each pass."""

    def __init__(self, view: Any, *, pack: bool) -> None:
        """`view` is a tree for this object alone; its linear layers are replaced. `pack`: by copies that compute faster."""
        names = {id(linear): name for name, linear in adaptable_linears(view).items()}
        head, self._pass = view.get_output_embeddings(), _Pass()
        self._device = view.get_input_embeddings().weight.device

        def packed(*linears: nn.Linear) -> PackedLinear:
            own = tuple(names.get(id(linear), "") for linear in linears)
            return _AdaptedLinear(own, self._pass, linears[0] is head, *linears)

        self._forward: Forward = make_forward(view, pack=pack, packed=packed)
        self._plain: list[_AdaptedLinear] = []
        if not isinstance(self._forward, FusedLlama):  # what is not packed: some layers, or all on a GPU
            for name, linear in adaptable_linears(view).items():
                parent, _, child = name.rpartition(".")
                layer = _AdaptedLinear((name,), self._pass, linear is head, linear, layout=Layout.PLAIN)
                setattr(view.get_submodule(parent) if parent else view, child, layer)
                self._plain.append(layer)
        self.min_rows = self._forward.min_rows

    @property
    def keeps_rows(self) -> bool:
        return self._forward.keeps_rows

    def use(self, rows: AdapterRows, where: Sequence[int]) -> None:
        """The next pass has these rows; its logits are requested at `where`."""
        self._pass.tokens = _RowPlan(rows, self._device)
        self._pass.positions = self._pass.tokens.select(where)

    def logits(self, ids_T: Tensor, positions_T: Tensor, state: AttentionState, where_N: Tensor) -> Tensor:
        return self._forward.logits(ids_T, positions_T, state, where_N)

    def refresh(self) -> None:
        self._forward.refresh()
        for layer in self._plain:
            layer.refresh()


class AdapterNames:
    """The adapters of an engine by name. Any thread may call it."""

    def __init__(self, model: Any) -> None:
        weight = model.get_input_embeddings().weight
        self._dtype, self._device = weight.dtype, weight.device
        self._shapes = {n: (m.out_features, m.in_features) for n, m in adaptable_linears(model).items()}
        self._known: dict[str, PackedAdapter] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def add(self, name: str, adapter: LoraAdapter) -> None:
        if name in self._known:
            raise ConfigError(f"There is an adapter {name!r} already. Remove it first, or take another name.")
        wrong = [own for own, shape in adapter.shapes.items() if self._shapes.get(own) != shape]
        if wrong or adapter.flat.device != self._device:
            raise ConfigError(
                f"The adapter {name!r} on {adapter.flat.device} was made for another model than this one on {self._device}: it "
                f"adapts {wrong[:2] or 'the same layers'}. Make it with LoraAdapter.create(engine.model, …)."
            )
        self._known[name] = PackedAdapter(adapter, self._dtype)

    def remove(self, name: str) -> None:
        self.find(name)
        self._known.pop(name, None)

    def find(self, name: str) -> PackedAdapter:
        found = self._known.get(name)
        if found is None:
            known = ", ".join(sorted(self._known)) or "none"
            raise ConfigError(f"There is no adapter {name!r}. Added adapters: {known}.")
        return found
