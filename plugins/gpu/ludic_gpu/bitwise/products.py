"""Matrix products in which a row's result depends on that row alone, not on the other rows or on its place among them.

A math library chooses its kernel by the shape of a call, and another kernel may sum in another order. So every product is made
of calls of a few fixed sizes, the last one padded. `checked_sizes` tests on this machine that a row gets the same bits at every
place and in every size; a larger size that differs is not used, and without any size that holds it raises `NotBitwise`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ludic.types import ConfigError

_CPU_SIZES, _GPU_SIZES = (16, 64, 256, 1024), (64, 256, 1024, 4096)
"""Rows of a call. Small ones waste less padding on few rows, large ones cost fewer calls."""
_CPU_BATCHES, _GPU_BATCHES = (8, 64, 512), (8, 64, 512, 4096)
"""Matrices of a call with one pair of small matrices per item (attention)."""
_CPU_WORK, _GPU_WORK = 1 << 31, 1 << 38
"""Multiplications of the largest call, so that a check takes a moment; the smallest size is exempt."""
_SHIFTS = (1, 5)
_checking = threading.Lock()


class NotBitwise(ConfigError):
    """Bitwise mode was asked for where it cannot hold."""


def wide(x: Tensor) -> Tensor:
    """The form that products are computed in: fp32 on a CPU, whose half-precision products are slow on most processors."""
    return x.float() if x.device.type == "cpu" else x


# Letters: T rows, I values of a row before the product, O after it; B items of a batch, R rows of an item.
def operand_of(weight_OI: Tensor) -> Tensor:
    """A layer's weight as the right side of `product`: [I, O], on a CPU a contiguous fp32 copy."""
    return wide(weight_OI.detach()).t().contiguous() if weight_OI.device.type == "cpu" else weight_OI.detach().t()


@torch.no_grad()
def product(x_TI: Tensor, operand_IO: Tensor) -> Tensor:
    """x · operand in the dtype of x, in calls of fixed sizes."""
    (num_rows, num_in), num_out = x_TI.shape, operand_IO.shape[1]
    sizes = _row_sizes(num_in, num_out, operand_IO.dtype, operand_IO.device)
    rows = _padded(wide(x_TI).contiguous(), sizes[0])
    if len(rows) in sizes:
        return torch.mm(rows, operand_IO)[:num_rows].to(x_TI.dtype)
    out = rows.new_empty(len(rows), num_out)
    for here in _pieces(len(rows), sizes):
        torch.mm(rows[here], operand_IO, out=out[here])
    return out[:num_rows].to(x_TI.dtype)


@torch.no_grad()
def batch_product(left_BRI: Tensor, right_BIO: Tensor) -> Tensor:
    """The product of each pair of matrices, in fp32."""
    num_items = len(left_BRI)
    _, num_rows, num_in = left_BRI.shape
    sizes = _batch_sizes(num_rows, num_in, right_BIO.shape[2], left_BRI.device)
    left, right = (_padded(x.contiguous(), sizes[0]) for x in (left_BRI, right_BIO))
    out = left.new_empty(len(left), left.shape[1], right.shape[2])
    for here in _pieces(len(left), sizes):
        torch.bmm(left[here], right[here], out=out[here])
    return out[:num_items]


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -len(x) % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _pieces(count: int, sizes: Sequence[int]) -> Iterator[slice]:
    """Cover `count`, a multiple of the smallest size, with as few calls as possible."""
    start = 0
    for size in reversed(sizes):
        while count - start >= size:
            yield slice(start, start + size)
            start += size


# --- a linear layer with gradients ---


def _forward(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, operand_IO: Tensor | None) -> Tensor:
    out_TO = product(x_TI, operand_of(weight_OI) if operand_IO is None else operand_IO)
    return out_TO if bias_O is None else out_TO + bias_O


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, operand_IO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return _forward(x_TI, weight_OI, bias_O, operand_IO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> Any:
        x_TI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = wide(grad_TO)
        return (
            (grad @ wide(weight_OI)).to(x_TI.dtype) if needs_x else None,
            (grad.t() @ wide(x_TI)).to(weight_OI.dtype) if needs_weight else None,
            grad.sum(0).to(weight_OI.dtype) if needs_bias else None,
            None,
        )


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, operand_IO: Tensor | None = None) -> Tensor:
    """A linear layer in calls of fixed sizes; the gradient is the usual one. `operand_IO`: the weight's, if it is at hand."""
    compute = _Linear.apply if torch.is_grad_enabled() else _forward
    out: Tensor = compute(x_TI, weight_OI, bias_O, operand_IO)
    return out


# --- which sizes hold on this machine ---


def _row_sizes(num_in: int, num_out: int, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return _checked_rows(num_in, num_out, dtype, device, threads)


def _batch_sizes(num_rows: int, num_in: int, num_out: int, device: torch.device) -> tuple[int, ...]:
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return _checked_batches(num_rows, num_in, num_out, device, threads)


@cache
def _checked_rows(
    num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, num_threads: int
) -> tuple[int, ...]:
    generator = torch.Generator(device).manual_seed(num_in)
    # Columns repeat: a head's matrix of random numbers would take seconds to draw.
    columns = torch.randn(min(num_out, 1021), num_in, generator=generator, device=device).to(dtype)
    weight = columns[torch.arange(num_out, device=device) % len(columns)]
    operand = operand_of(weight)
    sizes = _affordable(_CPU_SIZES, _GPU_SIZES, num_in * num_out, device)
    x = torch.randn(max(sizes[-1], 2 * sizes[0]), num_in, generator=generator, device=device).to(dtype)
    what = f"a product of [rows, {num_in}] with [{num_in}, {num_out}] in {dtype} on {device}"
    return checked_sizes(lambda rows: torch.mm(rows, operand), (x,), sizes, what)


@cache
def _checked_batches(
    num_rows: int, num_in: int, num_out: int, device: torch.device, num_threads: int
) -> tuple[int, ...]:
    generator = torch.Generator(device).manual_seed(num_in)
    sizes = _affordable(_CPU_BATCHES, _GPU_BATCHES, num_rows * num_in * num_out, device)
    left = torch.randn(sizes[-1], num_rows, num_in, generator=generator, device=device)
    right = torch.randn(sizes[-1], num_in, num_out, generator=generator, device=device)
    what = f"a product of {num_rows} rows in a batch ([{num_rows}, {num_in}] with [{num_in}, {num_out}]) on {device}"
    found = checked_sizes(torch.bmm, (left, right), sizes, what)
    # The rows of an item: each at every place.
    item, own = left[: sizes[0]], right[: sizes[0]]
    whole = torch.bmm(item, own)
    if any(not torch.equal(torch.bmm(item.roll(s, 1), own).roll(-s, 1), whole) for s in range(1, num_rows)):
        raise _refusal(what)
    return found


def _affordable(on_cpu: Sequence[int], on_gpu: Sequence[int], work: int, device: torch.device) -> tuple[int, ...]:
    sizes, limit = (on_cpu, _CPU_WORK) if device.type == "cpu" else (on_gpu, _GPU_WORK)
    return (sizes[0], *(size for size in sizes[1:] if size * work <= limit))


def checked_sizes(
    call: Callable[..., Tensor], inputs: tuple[Tensor, ...], sizes: Sequence[int], what: str
) -> tuple[int, ...]:
    """The sizes in which `call` gives each row of `inputs` the same bits as in the first size, at every place.

    Raises `NotBitwise` if a row's place or its neighbours matter in calls of the first size.
    """
    with _checking, torch.no_grad():
        size = sizes[0]

        def in_calls(rows: tuple[Tensor, ...], size: int) -> Tensor:
            return torch.cat([call(*(x[a : a + size] for x in rows)) for a in range(0, len(rows[0]), size)])

        expected = in_calls(inputs, size)
        few = slice(2 * size)
        for shift in _SHIFTS:
            moved = in_calls(tuple(x[few].roll(shift, 0) for x in inputs), size)
            if not torch.equal(moved.roll(-shift, 0), expected[few]):
                raise _refusal(what)
        for place in (0, size // 2, size - 1):  # one row among padding
            alone = tuple(torch.zeros_like(x[:size]) for x in inputs)
            for x, row in zip(alone, inputs, strict=True):
                x[place] = row[place]
            if not torch.equal(call(*alone)[place], expected[place]):
                raise _refusal(what)
        return (size, *(larger for larger in sizes[1:] if torch.equal(in_calls(inputs, larger), expected)))


def _refusal(what: str) -> NotBitwise:
    return NotBitwise(
        f"Bitwise mode cannot hold here: {what} gives a row other bits at another place or among other rows, even in calls of "
        "one size. Run without bitwise, or on another device or PyTorch build."
    )


@cache
def check_functions(device: torch.device) -> None:
    """Raise `NotBitwise` unless exp and log give a number the same bits at every place of a tensor: the end of a tensor may take
    another path than its vectors."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(100_003, generator=generator, device=device) * 5
    for name, function, values in (("exp", torch.exp, x), ("log", torch.log, x.abs() + 1)):
        whole = function(values)
        for start in (0, 1, 3, 8, 13):
            for length in (1, 2, 7, 16, 33, 100, 40_001):
                here = slice(start, start + length)
                if not torch.equal(function(values[here].clone()), whole[here]):
                    raise NotBitwise(
                        f"Bitwise mode cannot hold here: torch.{name} on {device} gives a number other bits at another place of a "
                        "tensor. Run without bitwise, or on another device or PyTorch build."
                    )
