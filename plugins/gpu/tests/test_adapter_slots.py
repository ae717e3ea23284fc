"""Adapters in slots: rows get what their own adapter gives, whatever is in the other slots, and slots are used again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("peft", reason="the lora extra is not installed")

from ludic.models.adapters import AdapterSpec
from ludic.models.adapters.forward import PackedAdapter
from ludic_gpu.cuda.adapter_slots import BROKEN, NO_SLOT, AdapterSlots, StackedProduct
from tests.unit.inference.local.tiny_models import shared_model
from tests.unit.models.adapters.peft_reference import tuned

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj")
SPECS = [
    AdapterSpec(rank=4, seed=0),
    AdapterSpec(rank=2, seed=1, alpha=7.0),
    AdapterSpec(rank=3, seed=2, mlp=False),
    AdapterSpec(rank=8, seed=3),
    AdapterSpec(rank=1, seed=4, attention=False),
]


def packed(number: int, value: float | None = None) -> PackedAdapter:
    adapter = tuned(shared_model(), SPECS[number], number)
    if value is not None:
        adapter.flat[-1] = value
    return PackedAdapter(adapter, torch.float32)


def product() -> tuple[StackedProduct, list[int], nn.Linear]:
    linears = [shared_model().get_submodule(name) for name in NAMES]
    return (
        StackedProduct(NAMES, [m.out_features for m in linears], linears[0].weight),
        [m.out_features for m in linears],
        linears[0],
    )


def added(slots: AdapterSlots, stacked: StackedProduct, owners: list[PackedAdapter | None], x_TN, num_outputs: int):
    slots.place(owners)
    own = slots.of(owners)
    out = torch.zeros(len(owners), num_outputs)
    used = slots.num_used(own)
    return stacked.add(out, x_TN, torch.from_numpy(own), used) if used else out


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=7), min_size=1, max_size=6))
def test_each_row_gets_what_its_adapter_gives_in_passes_one_after_the_other(passes):
    known = [packed(number) for number in range(len(SPECS))]
    stacked, sizes, linear = product()
    slots = AdapterSlots([stacked])
    for seed, numbers in enumerate(passes):
        owners = [None if n < 0 else known[n] for n in numbers]
        x_TN = torch.randn(len(owners), linear.in_features, generator=torch.Generator().manual_seed(seed))
        found = added(slots, stacked, owners, x_TN, sum(sizes))
        expected = torch.zeros_like(found)
        for row, owner in enumerate(owners):
            if owner is not None:
                owner.add(expected[row : row + 1], x_TN[row : row + 1], NAMES, sizes)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_broken_adapter_spoils_its_own_rows_alone(value):
    stacked, sizes, linear = product()
    slots, sound, broken = AdapterSlots([stacked]), packed(0), packed(1, value)
    x_TN = torch.randn(4, linear.in_features)
    before = added(slots, stacked, [sound, None], x_TN[:2], sum(sizes))
    together = added(slots, stacked, [sound, None, broken, broken], x_TN, sum(sizes))
    torch.testing.assert_close(together[:2], before, rtol=0, atol=1e-6)
    assert together[2:].isnan().all()
    alone = AdapterSlots([stacked])
    assert added(alone, stacked, [broken], x_TN[:1], sum(sizes)).isnan().all(), "also without any other"


def test_buffers_move_only_when_more_adapters_or_higher_ranks_come():
    stacked, _, _ = product()
    slots, known = AdapterSlots([stacked]), [packed(number) for number in range(4)]
    slots.place([known[0]])
    first = slots.generation
    slots.place([known[1], None])
    assert slots.generation == first and slots.of([known[1], None]).tolist() == [0, NO_SLOT], "the slot is taken over"
    slots.place(known[:3])
    second = slots.generation
    assert second > first and sorted(slots.of(known[:3])) == [0, 1, 2]
    slots.place([known[0]])
    assert slots.generation == second and slots.num_used(slots.of([known[0]])) <= 4
    slots.place([known[3]])
    assert slots.generation > second, "a higher rank"
    assert slots.of([known[1]]).tolist() == [BROKEN], "only placed adapters have a slot"
