"""Activation offload on a GPU: asynchronous copies to pinned memory and back change nothing."""

import copy

import pytest
import torch

from ludic.models.execution import recompute_activations
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic_gpu import offload
from plugins.gpu.tests.test_cuda_fused_training import trainable
from tests.unit.training.samples import random_items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ITEMS = random_items([500, 300, 400, 100])


def gradients(model, *, moves, recompute, fused):
    model = copy.deepcopy(model)
    if recompute:
        recompute_activations(model)
    policy = TrainedPolicy(model, fused=fused, offload=moves)
    assert policy.is_fused == fused
    found = []
    for _ in range(3):  # the host's memory is used again
        model.zero_grad()
        accumulate_gradients(policy, TokenClippedSurrogateLoss(), ITEMS, micro_token_budget=700).means()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found, policy


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_without_offload(fused, recompute, monkeypatch):
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)
    monkeypatch.setattr(offload, "_IN_FLIGHT", 1 << 18)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model = trainable("qwen3", num_hidden_layers=4)
        expected, _ = gradients(model, moves=False, recompute=recompute, fused=fused)
        found, policy = gradients(model, moves=True, recompute=recompute, fused=fused)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(theirs.keys() == ours.keys() for theirs, ours in zip(expected, found, strict=True))
    for name, grad in expected[0].items():
        # Flash attention adds up in any order in its backward pass, so equal passes differ, too; a bf16 number by its last bit.
        noise = max(float((again[name] - grad).abs().max()) for again in expected[1:])
        difference = max(float((ours[name] - grad).abs().max()) for ours in found)
        assert difference <= 4 * noise + 2**-8 * float(grad.abs().max()), (name, difference, noise)
    assert policy.forward_pass.offload is not None and policy.forward_pass.offload.host_bytes > 0
    assert all(slab.num_users == 0 for slab in policy.forward_pass.offload._slabs)


def test_memory_between_forward_and_backward_is_on_the_host(monkeypatch):
    monkeypatch.setattr(offload, "_IN_FLIGHT", 1 << 20)
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(1 << 20, device=device, requires_grad=True)
    held = {}
    for moves in (False, True):
        tape = offload.ActivationOffload(device).tape(1 << 20)
        before = torch.cuda.memory_allocated()
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack) if moves else torch.enable_grad():
            y = x
            for _ in range(20):
                y = y.sin()
        held[moves] = torch.cuda.memory_allocated() - before
        x.grad = None
        y.sum().backward()
        held["grad", moves] = x.grad.clone()
        del y
    assert held[True] < held[False] / 4
    assert torch.equal(held["grad", True], held["grad", False])
