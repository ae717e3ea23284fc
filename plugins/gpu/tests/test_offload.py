"""Activations in host memory: same bits, one copy per storage, memory that is used again.

Here the copies are from host to host; plugins/gpu/tests/test_cuda_offload.py runs them on a GPU.
"""

import gc
from copy import deepcopy

import pytest
import torch

from ludic.models.execution import recompute_activations
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic_gpu.llama.training import FusedDecoder
from ludic_gpu.offload import _IN_FLIGHT, ActivationOffload, HostTape
from ludic_ops.scaling import OFFLOAD_AHEAD
from plugins.gpu.tests.test_fused_training import inputs, through, trainable
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.samples import random_items
from tests.unit.training.test_trainer import with_adapter

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ITEMS = random_items([12, 20, 9, 31, 5])


def gradients(model, *, offload, recompute=False, packed=True, **options):
    """Loss and gradients of two micro-batches."""
    model = deepcopy(model).train()
    if recompute:
        recompute_activations(model)
    policy = TrainedPolicy(model, packed=packed, offload=offload, **options)
    sums = accumulate_gradients(policy, TokenClippedSurrogateLoss(), ITEMS, micro_token_budget=48)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert max(float(grad.abs().max()) for grad in found.values()) > 0
    return sums.means()["loss"], found, policy


def assert_same_bits(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert torch.equal(found[1][name], grad), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2-softcap"])
@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients_keep_their_bits(family, recompute):
    model = new_model(family).requires_grad_(True)
    plain = gradients(model, offload=False)
    offloaded = gradients(model, offload=True, recompute=recompute)
    assert_same_bits(offloaded, plain)
    assert offloaded[2].forward_pass.offload.host_bytes > 0


@pytest.mark.parametrize("options", [{"packed": False}, {"share_prefixes": True}])
def test_every_form_of_a_batch_keeps_its_bits(options):
    model = new_model().requires_grad_(True)
    assert_same_bits(
        gradients(model, offload=True, recompute=True, **options), gradients(model, offload=False, **options)
    )


def test_an_adapter_keeps_its_bits():
    model = with_adapter(new_model("llama", initializer_range=0.3))
    assert_same_bits(gradients(model, offload=True, recompute=True), gradients(model, offload=False))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_fused_pass_keeps_its_bits(family, recompute):
    model = trainable(family)
    expected = through(model, FusedDecoder(model).hidden(*inputs()))
    if recompute:
        recompute_activations(model)
    offload = ActivationOffload(CPU)
    found = through(model, FusedDecoder(model).hidden(*inputs(), offload.tape(41)))
    assert offload.host_bytes > 0
    assert_same_bits(found=(0.0, found[1]), expected=(0.0, expected[1]))
    assert torch.equal(found[0], expected[0])


class CountingTape(HostTape):
    def pack(self, tensor):
        packed = super().pack(tensor)
        self.packed = [*getattr(self, "packed", []), packed]
        return packed


def test_with_recomputation_only_the_inputs_of_layers_are_moved():
    model = trainable("llama", num_hidden_layers=3)
    recompute_activations(model)
    ids_T, positions_T, state = inputs()
    offload = ActivationOffload(CPU)
    tape = CountingTape(offload, frozenset([len(ids_T)]))
    decoder = model.get_decoder()
    with tape.saving():
        decoder(
            input_ids=ids_T[None], position_ids=positions_T[None], attention_mask=torch.empty(0, 0, 0, 0),
            use_cache=False, ludic_state=state,
        )  # fmt: skip
    hidden = [saved for saved in tape.packed if not isinstance(saved, torch.Tensor) and saved.shape[-1] == 32]
    in_fp32 = len(ids_T) * 32 * 4
    assert len({id(saved.moved) for saved in hidden}) <= 3 + 3, "three inputs, and what the last norm saves"
    assert all(saved.moved.num_bytes == in_fp32 for saved in hidden)


def test_views_of_one_storage_are_moved_once_and_come_back_as_they_were():
    offload = ActivationOffload(CPU)
    tape = offload.tape(6)
    base = torch.arange(48.0).view(6, 8)
    views = [base, base.t(), base[:, 4:], base[:, :1].expand(6, 5)]
    packed = [tape.pack(view) for view in views]
    assert len({id(saved.moved) for saved in packed}) == 1
    for saved, view in zip(packed, views, strict=True):
        back = tape.unpack(saved)
        assert back.stride() == view.stride() and torch.equal(back, view)
        assert back.data_ptr() != view.data_ptr()


def test_a_storage_that_changed_is_moved_again():
    tape = ActivationOffload(CPU).tape(6)
    base = torch.zeros(6)
    first = tape.pack(base)
    base.add_(1)
    second = tape.pack(base)
    assert tape.unpack(first).sum() == 0 and tape.unpack(second).sum() == 6


def test_weights_and_tensors_without_a_token_dimension_stay():
    tape = ActivationOffload(CPU).tape(6)
    weight = torch.nn.Parameter(torch.zeros(6, 6))
    assert tape.pack(weight) is weight
    assert isinstance(tape.pack(weight.t()), torch.Tensor)
    other = torch.zeros(5, 5)
    assert tape.pack(other) is other
    small = ActivationOffload(CPU, min_bytes=1000).tape(6)
    assert small.pack(base := torch.zeros(6)) is base


def test_host_memory_is_used_again_after_backward():
    offload = ActivationOffload(CPU, slab_bytes=1 << 12)
    sizes = []
    for _ in range(3):
        tape = offload.tape(64)
        x = torch.randn(64, 16, requires_grad=True)
        with tape.saving():
            y = x
            for _ in range(6):
                y = (y * y).sin()
        y.sum().backward()
        del y, tape
        gc.collect()
        sizes.append(offload.host_bytes)
        assert all(slab.num_users == 0 and slab.end == 0 for slab in offload._slabs)
    assert len(set(sizes)) == 1, "later passes take no more"


def test_a_tensor_larger_than_a_slab_gets_one_that_holds_it():
    offload = ActivationOffload(CPU, slab_bytes=1 << 10)
    tape = offload.tape(700)
    large = torch.randn(700, 3)
    assert torch.equal(tape.unpack(tape.pack(large)), large)
    assert offload.host_bytes == 1 << 14


def test_the_plan_knows_how_much_stays_on_the_gpu():
    assert _IN_FLIGHT == OFFLOAD_AHEAD
