"""Linear layers for a CPU that decodes: their weights once more, in the order in which the machine reads them.

A product of few rows with a large matrix spends most of its time rearranging that matrix. PyTorch does this on every
call, because training changes the weights; between two versions of a policy it has to be done only once. Large
matrices are kept in oneDNN's own blocked form, small ones transposed (there oneDNN's fixed cost per call is what
counts). Which way is taken depends on the shape alone, never on a measurement: the same model rounds the same way in
every process.

Both ways give a row the same result whatever other rows are in the batch (two rows at least: a single one takes another
path through the library). Plain `nn.Linear` does not, below nine rows.
"""

import torch
from torch import Tensor, nn

_LARGE = 1 << 18
"""Elements from which oneDNN's form is faster; measured on Neoverse-N1 with 1 to 64 rows."""
MIN_ROWS_PACKED = 2
MIN_ROWS_PLAIN = 16


class PackedLinear(nn.Module):
    """One or several `nn.Linear` of the same input, with a private, rearranged copy of their weights.

    `refresh` after the weights have changed. Several linears give their outputs side by side.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self._linears = linears  # a tuple: not registered, so that their parameters are not counted twice
        self.weight = linears[0].weight
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        is_large = self.in_features * self.out_features >= _LARGE
        self._is_large = is_large and torch.backends.mkldnn.is_available()
        self._packed: Tensor
        self._bias: Tensor | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights as they are now."""
        weight = _joined([linear.weight.detach() for linear in self._linears])
        biases = [linear.bias.detach() for linear in self._linears if linear.bias is not None]
        self._bias = _joined(biases) if biases else None
        if self._is_large:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS_PLAIN)
        else:
            self._packed = weight.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if self._is_large:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out
        flat = x.reshape(-1, self.in_features)
        out = torch.mm(flat, self._packed) if self._bias is None else torch.addmm(self._bias, flat, self._packed)
        return out.view(*x.shape[:-1], self.out_features)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def is_packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.dtype is torch.float32


def packed_bytes(model: nn.Module) -> int:
    """What the second copy takes."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and is_packable(m)]
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
