"""LoRA by hand and without CUDA graphs, as a GPU computes it: the same as the core's on a CPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("peft", reason="the lora extra is not installed")

from ludic.models.adapters import AdapterSpec
from ludic.models.adapters.forward import AdaptedForward
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic_gpu.cuda.backend import AdaptedRunner
from ludic_gpu.llama.adapters import adapters_of, stacked
from tests.unit.inference.local.test_adapters import adapters_for, answers, asked, engine_with
from tests.unit.inference.local.tiny_models import new_model, some_prompt
from tests.unit.models.adapters.peft_reference import tuned
from tests.unit.models.adapters.test_bank import NAME, _shared

pytestmark = pytest.mark.slow


async def test_runner_of_a_gpu_gives_the_same_answers_on_a_cpu():
    model = new_model("qwen2")
    adapters = adapters_for(model)
    jobs = [asked(some_prompt(n, 1), owner, temperature=t) for n, owner, t in
            [(5, None, 0.0), (9, "a", 1.0), (9, "a", 1.0), (9, "b", 1.0), (30, "c", 0.7)]]  # fmt: skip
    jobs.append(asked(some_prompt(9, 1), "a", temperature=1.0, top_k=3, repetition_penalty=1.2))
    plain = engine_with(model, adapters)
    expected = await answers(plain, jobs)
    scores = await plain.score_prompt(some_prompt(8), top_k=2, adapter="a")
    plain.close()
    engine = engine_with(model, adapters, max_prefill_tokens=16)
    backend = engine._worker.backend

    def runner(view, settings):
        view.set_attn_implementation(ATTENTION_NAME)
        blocks = settings.num_blocks, settings.block_size
        return AdaptedRunner(AdaptedForward(view, pack=False), backend._shape, *blocks)

    backend.runner = runner
    found = await answers(engine, jobs)
    again = await engine.score_prompt(some_prompt(8), top_k=2, adapter="a")
    engine.close()
    for one, other in zip(found, expected, strict=True):
        assert one.completion_token_ids.tolist() == other.completion_token_ids.tolist()
        np.testing.assert_allclose(one.completion_logprobs, other.completion_logprobs, atol=1e-4)
    np.testing.assert_allclose(again.logprobs, scores.logprobs, atol=1e-4)
    assert again.top_ids.tolist() == scores.top_ids.tolist()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 5)), min_size=1, max_size=6), st.integers(0, 99))
def test_stacked_adapters_give_what_each_gives_on_its_rows(owned, seed):
    """Values, gradients of the input and of every A and B; as the fused pass on a GPU computes them."""
    model, bank = _shared()
    adapters = [tuned(model, AdapterSpec(rank=1 + n, alpha=8.0, seed=n, attention=n != 2), n) for n in range(4)]
    spans = [(None if n < 0 else adapters[n], count) for n, count in owned]
    num_rows = sum(count for _, count in spans)
    module = bank.model.get_submodule(NAME)
    generator = torch.Generator().manual_seed(seed)
    x_TN, grad_TM = (torch.randn(num_rows, n, generator=generator) for n in (module.in_features, module.out_features))
    found = []
    with bank.using(spans):
        if not module.in_pass(num_rows):
            return
        for own in (adapters_of(module, torch.float32, num_rows), [stacked(module, num_rows, torch.float32)]):
            out_TM, grad_x_TN = torch.zeros_like(grad_TM), torch.zeros_like(x_TN)
            for adapter in own:
                adapter.add(out_TM, x_TN)
                inner_TR = adapter.backward(grad_TM, grad_x_TN)
                gradients = adapter.gradients(grad_TM, inner_TR, x_TN)
                torch.autograd.backward((adapter.a_RN, adapter.b_MR), gradients)
            grads = [p.grad.clone() for a in adapters for p in (a.weights(NAME) or ()) if p.grad is not None]
            found.append([out_TM, grad_x_TN, *grads])
            for adapter in adapters:
                for parameter in adapter.parameters():
                    parameter.grad = None
    assert len(found[0]) == len(found[1])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
