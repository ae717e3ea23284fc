"""LoRA on the experts of a mixture: its gradient, its merged weights, the engine that serves it."""

import asyncio

import numpy as np
import pytest
import torch

from ludic.inference.local import LocalEngine
from ludic.models.lora import dense_parameters
from ludic.models.weights import shared_view
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_gpu.experts import expert_parameters, merge_experts
from tests.tiny_families import family_model

peft = pytest.importorskip("peft", reason="peft is not installed; pip install 'ludic[lora]'")
MIXTURES = {"qwen3_moe": 2, "mixtral": 2, "gpt_oss": 2, "glm4_moe": 1, "deepseek_v3": 1}
"""And how many of their two layers have experts."""
IDS = torch.arange(3, 23)[None]


def adapted(family):
    """A mixture with an adapter that changes its output."""
    model = family_model(family)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=expert_parameters(model), task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    made = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return made


@pytest.mark.parametrize("family", MIXTURES)
def test_gradients_reach_every_expert_and_merged_weights_compute_the_same(family):
    model = adapted(family)
    plain = family_model(family)
    first = plain(IDS, use_cache=False).logits
    out = model(IDS, use_cache=False).logits
    assert not torch.allclose(out, first, atol=0.1)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if ".experts." in name and p.requires_grad}
    assert len(grads) == 2 * 2 * MIXTURES[family], "A and B of two matrices in each such layer"
    for name, grad in grads.items():
        by_expert = grad.view(4, 4, -1) if "lora_A" in name else grad.view(-1, 4, 4).permute(2, 1, 0)
        assert (by_expert.abs().amax(dim=(1, 2)) > 0).all(), name
    merged = dict(dense_parameters(model))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    assert torch.allclose(plain(IDS, use_cache=False).logits, out, atol=1e-4)
    assert torch.equal(model(IDS, use_cache=False).logits, out), "the base has not moved"


def test_the_engine_serves_the_adapter_merged_and_follows_its_updates():
    model = adapted("qwen3_moe").eval()
    engine = LocalEngine(model, record_experts=True)
    view = shared_view(model)
    assert merge_experts(view) and not any(type(m).__name__ == "ParamWrapper" for m in view.modules())

    def greedy() -> list[int]:
        request = TokenCompletionRequest(
            "m",
            np.array([5, 6, 7], dtype=np.int32),
            sampling=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            return_=ReturnSpec.for_rl(),
        )
        response, _ = asyncio.run(engine.complete_tokens(request))
        ids = torch.tensor([[5, 6, 7, *response.completion_token_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, 2:-1]
        assert logits.argmax(-1).tolist() == response.completion_token_ids.tolist()
        logps = logits.log_softmax(-1).max(-1).values.numpy()
        np.testing.assert_allclose(response.completion_logprobs, logps, atol=1e-4)
        return response.completion_token_ids.tolist()

    try:
        before = greedy()
        with engine.updating(), torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name and ".experts." in name:
                    parameter.mul_(-5)
        assert greedy() != before
    finally:
        engine.close()
