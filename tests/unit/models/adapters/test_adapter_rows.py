"""Rows of several adapters in one pass: whatever plan serves them, each row has the bits that its adapter alone gives it."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.models.adapters import AdapterSpec, LoraAdapter
from ludic.models.adapters.forward import PackedAdapter, _RowPlan

pytestmark = pytest.mark.slow

_NAMES, _SIZES, _WIDTH = ("q", "k", "v"), [24, 8, 8], 20


def adapter(seed, rank=3, projections=_NAMES):
    shapes = {name: (size, _WIDTH) for name, size in zip(_NAMES, _SIZES, strict=True) if name in projections}
    made = LoraAdapter(AdapterSpec(rank=rank), shapes, torch.device("cpu"))
    with torch.no_grad():
        made.flat.copy_(torch.randn(made.flat.shape, generator=torch.Generator().manual_seed(seed)))
    return PackedAdapter(made, torch.float32)


def alone(one, out, x):
    """Of one row, computed twice."""
    own = out.expand(2, -1).clone()
    one.add(own, x.expand(2, -1).contiguous(), _NAMES, _SIZES)
    return own[0]


@settings(max_examples=40, deadline=None)
@given(
    passes=st.lists(st.lists(st.integers(-1, 19), min_size=1, max_size=30), min_size=1, max_size=4),
    first=st.integers(0, 5),
    bad=st.integers(0, 19),
)
def test_each_row_of_any_pass_has_the_bits_of_its_adapter_alone(passes, first, bad):
    """One adapter holds NaN."""
    kinds = [{}, {"rank": 5}, {"projections": ("q", "v")}]
    adapters = [adapter(seed, **kinds[0 if seed < 18 else seed - 17]) for seed in range(20)]
    with torch.no_grad():
        adapters[bad]._adapter.flat.fill_(float("nan"))
    for number, owners in enumerate(passes):
        generator = torch.Generator().manual_seed(number)
        x, out = (torch.randn(len(owners), width, generator=generator) for width in (_WIDTH, sum(_SIZES)))
        expected = out.clone()
        for row, owner in enumerate(owners):
            if owner >= 0 and row >= first:
                expected[row] = alone(adapters[owner], out[row], x[row])
        plan = _RowPlan([(None if owner < 0 else adapters[owner], 1) for owner in owners])
        plan.add(out[first:], x[first:], _NAMES, _SIZES, first)
        # Other math libraries may round by the number of rows: a few units in the last place of the largest number.
        rounding = 32 * torch.finfo(torch.float32).eps * float(expected.nan_to_num(0.0).abs().max())
        tolerance = 0 if platform.machine() == "aarch64" else rounding
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance, equal_nan=True)
