"""LoRA adapters that requests name, on a GPU: in slots of captured graphs, and through the modules of other families."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
pytest.importorskip("peft", reason="peft is not installed")

from ludic.inference.local import LocalEngine, LogitsNotFinite  # noqa: E402 - after the skip
from ludic.models.adapters import AdapterSpec, LoraAdapter  # noqa: E402
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest  # noqa: E402
from ludic_tinker.server.losses import Row  # noqa: E402
from ludic_tinker.server.runs import (  # noqa: E402
    PassJob,
    TrainingBase,
    TrainingRun,
)
from plugins.gpu.tests.test_cuda_engine import prompts, tiny  # noqa: E402
from tests.unit.models.adapters.peft_reference import peft_model  # noqa: E402

SPECS = [AdapterSpec(rank=8, seed=0), AdapterSpec(rank=4, seed=1, head=False), AdapterSpec(rank=16, seed=2, mlp=False)]


def tuned(model: Any, spec: AdapterSpec, size: float = 0.05) -> LoraAdapter:
    adapter = LoraAdapter.create(model, spec)
    generator = torch.Generator().manual_seed(spec.seed or 0)
    with torch.no_grad():
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=generator).to(adapter.flat) * size)
    return adapter


def gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
    )
    return GPTNeoXForCausalLM(config).cuda().eval()


def answers(engine: Any, texts: list[list[int]], owners: list[str | None], **sampling: Any) -> list[Any]:
    async def run() -> list[Any]:
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, **sampling})
        plain = TokenCompletionRequest(model="", prompt_token_ids=[1], sampling=params, return_=ReturnSpec.for_rl())
        asked = [
            replace(plain, prompt_token_ids=np.array(text, dtype=np.int32), seed=i, adapter=owner)
            for i, (text, owner) in enumerate(zip(texts, owners, strict=True))
        ]
        found = await asyncio.gather(*(engine.complete_tokens(request) for request in asked), return_exceptions=True)
        return [one if isinstance(one, BaseException) else one[0] for one in found]

    return asyncio.run(run())


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], completion: list[int]) -> np.ndarray:
    logits = model(torch.tensor([[*prompt, *completion]]).cuda()).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion).cuda()[:, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize("make", [tiny, gpt_neox], ids=["graphs", "modules"])
def test_mixed_batches_have_the_logprobs_of_peft_for_each_adapter(make):
    model = make()
    adapters = {str(number): tuned(model, spec) for number, spec in enumerate(SPECS)}
    models = {None: model, **{name: peft_model(model, adapter) for name, adapter in adapters.items()}}
    engine = LocalEngine(model, kv_tokens=30_000, max_prefill_tokens=200, adapters=True)
    for name, adapter in adapters.items():
        engine.add_adapter(name, adapter)
    texts, owners = prompts(16), [None, "0", "1", "2"] * 4
    for order in (slice(0, 1), slice(0, 2), slice(None), slice(1, 3), slice(3, 4)):  # one adapter, several, others
        found = answers(engine, texts[order], owners[order])
        for prompt, owner, answer in zip(texts[order], owners[order], found, strict=True):
            expected = logprobs(models[owner], prompt, answer.completion_token_ids.tolist())
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=2e-4)
    engine.close()


def test_new_version_of_an_adapter_is_used_at_once():
    model = tiny()
    engine = LocalEngine(model, kv_tokens=30_000, adapters=True)
    texts = prompts(6)
    for version in range(3):
        adapter = tuned(model, SPECS[version])
        engine.add_adapter(f"v{version}", adapter)
        theirs = peft_model(model, adapter)
        for prompt, answer in zip(texts, answers(engine, texts, [f"v{version}"] * 6), strict=True):
            expected = logprobs(theirs, prompt, answer.completion_token_ids.tolist())
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=2e-4)
        engine.remove_adapter(f"v{version}")
    engine.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_broken_adapter_fails_its_own_requests_alone(value):
    model = tiny()
    sound, broken = tuned(model, SPECS[0]), tuned(model, SPECS[1])
    broken.flat.detach()[-1] = value
    engine = LocalEngine(model, kv_tokens=30_000, adapters=True)
    engine.add_adapter("sound", sound)
    engine.add_adapter("broken", broken)
    texts = prompts(9)
    found = answers(engine, texts, ["sound", None, "broken"] * 3)
    assert all(isinstance(answer, LogitsNotFinite) for answer in found[2::3])
    for start, theirs in ((0, peft_model(model, sound)), (1, model)):
        for prompt, answer in zip(texts[start::3], found[start::3], strict=True):
            expected = logprobs(theirs, prompt, answer.completion_token_ids.tolist())
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=2e-4)
    engine.close()


def test_scores_of_prompts_have_the_adapter():
    model = tiny()
    adapter = tuned(model, SPECS[0])
    engine = LocalEngine(model, kv_tokens=30_000, adapters=True)
    engine.add_adapter("a", adapter)
    text = prompts(1, 40, 41)[0]
    found = asyncio.run(engine.score_prompt(np.array(text, dtype=np.int32), adapter="a"))
    expected = logprobs(peft_model(model, adapter), text[:1], text[1:])
    np.testing.assert_allclose(found.logprobs, expected, atol=2e-4)
    engine.close()


def jobs_of(base: Any, owners: list[LoraAdapter]) -> list[Any]:
    rng = np.random.default_rng(0)
    found = []
    for adapter in owners:
        shared = rng.integers(3, 500, size=40)
        rows = []
        for length in (30, 50):
            tokens = np.concatenate([shared, rng.integers(3, 500, size=length)]).astype(np.int32)
            targets = np.concatenate([tokens[1:], [0]]).astype(np.int32)
            weights = np.where(np.arange(len(tokens)) >= 40, 1.0, 0.0).astype(np.float32)
            rows.append(Row(tokens, targets, {"weights": weights}))
        found.append(PassJob(TrainingRun(adapter), rows, "cross_entropy", {}))
    return found


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_runs_in_one_pass_have_the_gradients_of_each_alone(value):
    """To what sums in bf16 can round; also beside a run whose weights are broken."""
    model = tiny(torch.bfloat16)
    adapters = [tuned(model, spec) for spec in SPECS]
    base = TrainingBase(model, token_budget=4096)
    if value is not None:
        adapters[1].flat.detach()[-1] = value
    together, alone = jobs_of(base, adapters), jobs_of(base, adapters)
    joint = base.compute(together)
    for number, (job, single, result) in enumerate(zip(together, alone, joint, strict=True)):
        if value is not None and number == 1:
            continue
        (expected,) = base.compute([single])
        for ours, theirs in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=0.05)
        similarity = torch.nn.functional.cosine_similarity(job.run.gradient, single.run.gradient, dim=0)
        assert similarity > 0.999, float(similarity)
