"""Bitwise mode on a GPU: the sampler's log-probs are the trainer's, bit for bit."""

import numpy as np
import pytest
import torch

from ludic.training.learner.policy import TrainedPolicy
from plugins.gpu.tests.test_bitwise_engine import play
from tests.unit.inference.local.tiny_models import make_engine, new_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_sampler_and_trainer_have_the_same_bits_on_a_gpu(family, dtype):
    # Heads of 64: the flash attention that gives the gradient takes no smaller ones in every version.
    model = new_model(family, hidden_size=256, head_dim=64).to("cuda", dtype).requires_grad_()
    limits = {"kv_tokens": 176, "max_sequences": 5, "max_prefill_tokens": 29, "max_model_len": 168, "block_size": 16}
    async with make_engine(model, bitwise=True, **limits) as engine:
        items = await play(engine, np.random.default_rng(0))
    assert engine.stats["prefix_tokens_reused"]
    usual = TrainedPolicy(model, mixed_precision_dtype=None)
    for shares in (False, True):
        policy = TrainedPolicy(model, bitwise=True, share_prefixes=shares)
        for part in (items, items[3:8], items[9:10]):
            batch = policy.batch(part)
            logps, _ = policy.logps(batch)
            assert torch.equal(logps.detach(), batch.actions.old_logp_A)
            if dtype is torch.float32:
                parameters = list(model.parameters())
                ours, theirs = (
                    torch.autograd.grad(p.logps(p.batch(part))[0].sum(), parameters) for p in (policy, usual)
                )
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3 * float(other.abs().max()))
