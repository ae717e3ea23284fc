"""Linear layers over a rearranged copy of their weights, for the embedded engine on a CPU.

A product of few rows with a large matrix spends most of its time rearranging that matrix. PyTorch rearranges on every call,
because training changes the weights; between two policy versions once is enough. A row should have the same result whatever
other rows are in the batch. Math libraries promise no such thing: they choose kernels by processor, dtype, shape, number of
rows and threads. So `keeps_rows` tries the shapes that a model has.
"""

import platform
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS_PACKED = 2
"""A product with a single row takes another path through the libraries."""
MIN_ROWS_PLAIN = 16
ROWS_PER_THREAD = 4
"""Threads divide the rows of a plain product; one with fewer rows rounds otherwise (MKL, 1 to 16 threads)."""
_LARGE = 1 << 18
"""Elements from which oneDNN's layout is faster; measured on Neoverse-N1 with 1 to 64 rows."""
_PROBED_BATCHES = (2, 3, 5, 9, 16, 17, 20, 24, 33, 40, 64, 100, 130)
_PROBED_ROWS = 260
_PROBED_OUTPUTS = 8192
"""A head has as many outputs as there are tokens; trying all of them would take seconds and a gigabyte."""
_PERIOD = 100_003
"""Different values in a probed matrix."""


class Layout(Enum):
    """How a matrix is stored for its products."""

    PLAIN = "plain"
    """As `nn.Linear` has it."""
    TRANSPOSED = "transposed"
    """Faster for small matrices, where oneDNN's fixed cost per call dominates."""
    BLOCKED = "blocked"
    """oneDNN's layout."""

    def arrange(self, weight: Tensor) -> Tensor:
        if self is Layout.BLOCKED:
            blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS_PLAIN)
            return blocked
        return weight.t().contiguous() if self is Layout.TRANSPOSED else weight

    def product(self, x: Tensor, arranged: Tensor, bias: Tensor | None) -> Tensor:
        """`x` times the transposed weight, plus the bias."""
        if self is Layout.BLOCKED:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, arranged, bias, "none", [], "")
            return out
        if self is Layout.PLAIN:
            return F.linear(x, arranged, bias)
        flat = x.reshape(-1, x.shape[-1])
        out = torch.mm(flat, arranged) if bias is None else torch.addmm(bias, flat, arranged)
        return out.view(*x.shape[:-1], arranged.shape[1])


def keeps_rows(layout: Layout, num_in: int, num_out: int, dtype: torch.dtype, min_rows: int) -> bool:
    """Whether, on this processor and with this number of threads, products of this shape give a row the same result in all of
    the tried batches of at least `min_rows` rows."""
    return _keeps_rows(layout, num_in, num_out, dtype, min_rows, torch.get_num_threads())


@cache
@torch.inference_mode()
def _keeps_rows(layout: Layout, num_in: int, num_out: int, dtype: torch.dtype, min_rows: int, num_threads: int) -> bool:
    values = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(dtype)
    x, weight = (
        values.repeat(-(-size * num_in // _PERIOD))[: size * num_in].view(size, num_in)
        for size in (_PROBED_ROWS, min(num_out, _PROBED_OUTPUTS))
    )
    arranged = layout.arrange(weight)
    everything = layout.product(x, arranged, None)
    return all(
        torch.equal(layout.product(x[:count].contiguous(), arranged, None), everything[:count])
        for count in _PROBED_BATCHES
        if count >= min_rows
    )


class PackedLinear(nn.Module):
    """One or several `nn.Linear` with the same input, over a rearranged private copy of their weights.

    Call `refresh` after the weights have changed. The outputs of several linears are concatenated.
    """

    def __init__(self, *linears: nn.Linear, layout: Layout | None = None) -> None:
        """`layout`: the one to take, untried; by default the fastest that keeps rows."""
        super().__init__()
        self._linears = linears  # a tuple: unregistered, so that parameters are not counted twice
        self.weight = linears[0].weight
        self.bias = linears[0].bias if len(linears) == 1 else None
        """Some modules read weight and bias of their layers without calling them."""
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        layouts = _layouts(self.in_features * self.out_features, self.weight.dtype)
        shape = self.in_features, self.out_features, self.weight.dtype, MIN_ROWS_PACKED
        found = None if layout else next((layout for layout in layouts if keeps_rows(layout, *shape)), None)
        self.keeps_rows = found is not None
        """True if a row, from two rows on, has the same result whatever other rows are in the batch."""
        self._layout = layout or found or layouts[0]
        self._packed: Tensor
        self._bias: Tensor | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights."""
        biases = [linear.bias.detach() for linear in self._linears if linear.bias is not None]
        self._bias = _joined(biases) if biases else None
        self._packed = self._layout.arrange(_joined([linear.weight.detach() for linear in self._linears]))

    def forward(self, x: Tensor, first_row: int = 0) -> Tensor:
        """`first_row`: the place in the pass of the first row of `x`, for layers that treat rows differently."""
        return self._layout.product(x, self._packed, self._bias)


Pack: TypeAlias = Callable[..., PackedLinear]
"""Makes a packed layer of linear layers with the same input."""


def _layouts(num_elements: int, dtype: torch.dtype) -> list[Layout]:
    """Layouts of a matrix of this size, the fastest first."""
    if not torch.backends.mkldnn.is_available():
        return [Layout.TRANSPOSED]
    if dtype is torch.bfloat16:
        return [Layout.BLOCKED]
    found = [Layout.TRANSPOSED, Layout.BLOCKED]
    return found[::-1] if num_elements >= _LARGE else found


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def is_packable(module: nn.Module) -> bool:
    """Whether a linear layer is in fp32, or in bf16 where oneDNN computes in it."""
    return type(module) is nn.Linear and (
        module.weight.dtype is torch.float32 or (module.weight.dtype is torch.bfloat16 and _has_bf16())
    )


@cache
def _has_bf16() -> bool:
    is_x86 = platform.machine() in ("x86_64", "AMD64")  # not tried on others
    return is_x86 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
