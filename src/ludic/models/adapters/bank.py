"""`AdapterBank`: one forward pass over flat tokens of several adapters.

The base product is computed for all tokens at once; each adapter is applied to its own rows alone, by slices. So a NaN in one
adapter reaches no row of another, and a gradient reaches only the adapter whose rows it comes from. The fused pass on a GPU
of the plug-in for GPUs stacks adapters instead, and keeps that promise for finite numbers only.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludic.models.adapters.adapter import AdapterProduct, LoraAdapter, adaptable_linears
from ludic.models.head import Head, find_head
from ludic.models.weights import shared_view

_MAX_TURNED = 1 << 28
"""Weights of a base model that are also kept transposed for the forward pass on a CPU, which multiplies by such a copy 5 to 20 %
faster than by a transposed view, and small matrices three times: a gigabyte in fp32."""
Spans = Sequence[tuple[LoraAdapter | None, int]]
"""(adapter, number of rows) in the order of the rows; None is the base model."""


class RowSpan(NamedTuple):
    """Rows of one adapter."""

    adapter: LoraAdapter
    start: int
    end: int


def row_spans(spans: Spans) -> tuple[list[RowSpan], int]:
    """The rows that have an adapter, neighbours of one adapter as one span; and the number of all rows."""
    found: list[RowSpan] = []
    start = 0
    for adapter, count in spans:
        end = start + count
        if adapter is not None and count:
            if found and found[-1].adapter is adapter and found[-1].end == start:
                found[-1] = RowSpan(adapter, found[-1].start, end)
            else:
                found.append(RowSpan(adapter, start, end))
        start = end
    return found, start


class AdapterBank:
    """A private view of a base model whose linear layers apply the adapters of the current pass. Freezes the base.

    The view belongs to one thread: the trainer and the inference engine have a bank each, over the same base tensors.
    The output layer of the view, `head`, stays plain: its adapters are the caller's.
    """

    def __init__(self, model: Any) -> None:
        model.requires_grad_(False)
        self.model = shared_view(model)
        """Call it inside `using`."""
        self.head: Head = find_head(self.model)
        output = self.model.get_output_embeddings()
        self._spans: list[RowSpan] = []
        self._num_rows: int | None = None
        self._others: dict[Any, Tensor] = {}
        """The results of `others` in the current pass."""
        self.head_name = ""
        """Name of the output layer's module."""
        linears = adaptable_linears(self.model)
        size = sum(linear.weight.numel() for linear in linears.values() if linear is not output)
        turns = size <= _MAX_TURNED and output.weight.device.type == "cpu" and output.weight.dtype is torch.float32
        for name, linear in linears.items():
            if linear is output:
                self.head_name = name
                continue
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, AdaptedLinear(linear, name, self, turns=turns))

    @contextlib.contextmanager
    def using(self, spans: Spans) -> Iterator[None]:
        """Forward passes inside apply these adapters to the flat tokens: (adapter or None, number of tokens) in order.

        The backward pass may run afterwards, unless layers are recomputed in it.
        """
        before = self._spans, self._num_rows
        self._spans, self._num_rows = row_spans(spans)
        try:
            yield
        finally:
            self._spans, self._num_rows = before
            self._others = {}

    def spans_of(self, num_rows: int) -> list[RowSpan]:
        """Those of the current pass; none outside of one."""
        assert self._num_rows in (None, num_rows), f"a pass over {num_rows} tokens, spans over {self._num_rows}"
        return self._spans

    def others(self, spans: tuple[tuple[int, int, int], ...], num_rows: int, device: torch.device) -> Tensor:
        """True where a row of the pass is in another span (first row, end, rank) than the column, which are ranks side by side."""
        if spans not in self._others:
            owners_T = torch.full((num_rows,), -1)
            for number, (start, end, _) in enumerate(spans):
                owners_T[start:end] = number
            owners_R = torch.repeat_interleave(torch.tensor([rank for *_, rank in spans]))
            self._others[spans] = owners_T.to(device)[:, None] != owners_R.to(device)[None]
        return self._others[spans]


# Letters: T flat tokens, N inputs of a projection, M its outputs, R the rank.
class AdaptedLinear(nn.Module):
    """A frozen linear layer and the adapters of the bank's current pass."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, name: str, bank: AdapterBank, *, turns: bool) -> None:
        """`turns`: keep a transposed copy of the weight for the forward pass."""
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._name = name
        self._turned_NM = linear.weight.detach().t().contiguous() if turns else linear.weight.detach().t()
        self._bank = (bank,)  # a tuple, so that the module does not hold a tree that holds the module

    def forward(self, x: Tensor) -> Tensor:
        x_TN = x.reshape(-1, self.in_features)
        adapters = self.in_pass(len(x_TN))
        if torch.is_grad_enabled():
            rows = [(own.scale, own.rows) for own in adapters]
            weights = [weight for own in adapters for weight in (own.a_RN, own.b_MR)]
            out_TM: Tensor = _AdaptedProduct.apply(x_TN, self.weight, self._turned_NM, self.bias, rows, *weights)
        else:
            out_TM = _product(x_TN, self._turned_NM, self.bias, [own.to(x.dtype) for own in adapters])[0]
        return out_TM.view(*x.shape[:-1], self.out_features)

    def others(self, spans: tuple[tuple[int, int, int], ...], num_rows: int) -> Tensor:
        """`AdapterBank.others`."""
        return self._bank[0].others(spans, num_rows, self.weight.device)

    def in_pass(self, num_rows: int) -> list[AdapterProduct]:
        """The adapters of the current pass over this number of rows, with their parameters."""
        return [
            AdapterProduct(*pair, own.adapter.scale, slice(own.start, own.end))
            for own in self._bank[0].spans_of(num_rows)
            if (pair := own.adapter.weights(self._name)) is not None
        ]


def _product(
    x_TN: Tensor, weight_NM: Tensor, bias_M: Tensor | None, adapters: Sequence[AdapterProduct]
) -> tuple[Tensor, list[Tensor]]:
    """[T, M], and A x of every adapter."""
    out_TM = x_TN @ weight_NM if bias_M is None else torch.addmm(bias_M, x_TN, weight_NM)
    return out_TM, [own.add(out_TM, x_TN) for own in adapters]


def _products(
    rows: Sequence[tuple[float, slice]], weights: Sequence[Tensor], dtype: torch.dtype
) -> list[AdapterProduct]:
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return [AdapterProduct(*pair, *own).to(dtype) for own, pair in zip(rows, pairs, strict=True)]


class _AdaptedProduct(torch.autograd.Function):
    """`_product` with gradients of the input and of every adapter's A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TN: Tensor,
        weight_MN: Tensor,
        weight_NM: Tensor,
        bias_M: Tensor | None,
        rows: list[tuple[float, slice]],
        *weights: Tensor,
    ) -> Tensor:
        out_TM, inner = _product(x_TN, weight_NM, bias_M, _products(rows, weights, x_TN.dtype))
        ctx.rows = rows
        ctx.save_for_backward(x_TN, weight_MN, *weights, *inner)
        return out_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> Any:
        x_TN, weight_MN, *rest = ctx.saved_tensors
        count = 2 * len(ctx.rows)
        weights, kept = rest[:count], rest[count:]
        grad_x_TN = grad_TM @ weight_MN if ctx.needs_input_grad[0] else None
        grads: list[Tensor] = []
        for own, inner_TR in zip(_products(ctx.rows, weights, grad_TM.dtype), kept, strict=True):
            grads += own.gradients(grad_TM, own.backward(grad_TM, grad_x_TN), x_TN, inner_TR)
        wanted = zip(grads, weights, ctx.needs_input_grad[5:], strict=True)
        return grad_x_TN, None, None, None, None, *(g.to(w.dtype) if needed else None for g, w, needed in wanted)
