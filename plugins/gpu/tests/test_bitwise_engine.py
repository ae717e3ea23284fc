"""Bitwise mode end to end: the sampler's log-probs are the trainer's, bit for bit."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from ludic.inference.local.snapshot import EngineSnapshot
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import ConfigError, SAWItem
from ludic_gpu.bitwise.products import NotBitwise
from tests.extended import cases
from tests.unit.inference.local.tiny_models import VOCAB, ask, ask_all, make_engine, new_model, request, some_prompt
from tests.unit.training.samples import item_of

pytestmark = pytest.mark.slow

SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 0.0})
SETTINGS += ({"temperature": 0.9, "top_k": 20}, {"temperature": 1.0, "min_p": 0.05})


async def play(engine, rng) -> list[SAWItem]:
    """Groups on a few prompts, then a second turn on some of the replies, all with random lengths and settings."""
    prompts = [rng.integers(VOCAB, size=int(rng.integers(30, 60))).tolist() for _ in range(3)]
    prompts[1] = prompts[0][:40] + prompts[1]
    items: list[SAWItem] = []
    for _ in range(2):
        asked = [
            request(
                prompts[int(rng.integers(3))],
                seed=int(rng.integers(1 << 30)),
                max_tokens=int(rng.integers(1, 24)),
                **SETTINGS[int(rng.integers(len(SETTINGS)))],
            )
            for _ in range(7)
        ]
        replies = await ask_all(engine, asked)
        items += [item_of(reply, one.sampling.temperature) for one, reply in zip(asked, replies, strict=True)]
        prompts = [[*items[-i - 1].input_ids.tolist(), *some_prompt(3 * i + 1)] for i in range(3)]
    return items


@pytest.mark.parametrize("dtype", cases([torch.float32, torch.bfloat16], default=[torch.bfloat16]))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_sampler_and_trainer_have_the_same_bits(family, dtype):
    """In any batch, through preemption, shared prefixes, parts of prompts and second turns; packed in any way."""
    rng = np.random.default_rng([len(family), dtype.itemsize])
    model = new_model(family).to(dtype)
    limits = {"kv_tokens": 168, "max_sequences": 5, "max_prefill_tokens": 29, "max_model_len": 168, "block_size": 4}
    async with make_engine(model, bitwise=True, **limits) as engine:
        items = await play(engine, rng)
        stats = engine.stats
    assert stats["preemptions"] and stats["prefix_tokens_reused"]
    for shares in (False, True):
        policy = TrainedPolicy(model, bitwise=True, share_prefixes=shares)
        for part in (items, items[3:8], items[9:10]):
            batch = policy.batch(part)
            logps, _ = policy.logps(batch)
            assert batch.actions.old_logp_A is not None
            assert torch.equal(logps, batch.actions.old_logp_A)


async def test_an_adapter_keeps_the_bits():
    model = get_peft_model(new_model(), LoraConfig(target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    async with make_engine(model, bitwise=True) as engine:
        replies = await ask_all(engine, [request(some_prompt(n), temperature=1.0, seed=n) for n in (3, 66)])
    policy = TrainedPolicy(model, bitwise=True)
    batch = policy.batch([item_of(reply, 1.0) for reply in replies])
    logps, _ = policy.logps(batch)
    assert torch.equal(logps.detach(), batch.actions.old_logp_A)
    with model.disable_adapter():
        assert not torch.allclose(policy.logps(batch)[0], logps, atol=1e-2)


async def test_scores_and_snapshots_have_the_same_bits():
    model, prompt = new_model("qwen3"), some_prompt(70)
    async with make_engine(model, bitwise=True) as engine:
        reply = await ask(engine, prompt, temperature=0.8, seed=1)
        assert reply.completion_logprobs is not None
        scores = await engine.score_tokens(np.array(prompt), reply.completion_token_ids, temperature=0.8)
        assert scores.tolist() == list(reply.completion_logprobs)
        snapshot = EngineSnapshot(engine, kv_tokens=512)
        again, _ = await snapshot.complete_tokens(request(prompt, temperature=0.8, seed=1))
        assert list(again.completion_logprobs) == list(reply.completion_logprobs)
        snapshot.engine.close()


async def test_bitwise_engine_writes_what_the_usual_engine_writes():
    prompts = [some_prompt(n) for n in (3, 70, 40)]
    replies = []
    for bitwise in (False, True):
        async with make_engine(bitwise=bitwise) as engine:
            replies.append(await ask_all(engine, [request(p, temperature=1.0, seed=7) for p in prompts]))
    for usual, ours in zip(*replies, strict=True):
        assert ours.completion_token_ids.tolist() == usual.completion_token_ids.tolist()
        np.testing.assert_allclose(ours.completion_logprobs, usual.completion_logprobs, atol=1e-4)


async def test_new_weights_are_used():
    model, prompt = new_model(), some_prompt(9)
    async with make_engine(model, bitwise=True) as engine:
        before = await ask(engine, prompt)
        with engine.updating(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        after = await ask(engine, prompt)
    item = item_of(after, 0.0)
    policy = TrainedPolicy(model, bitwise=True)
    batch = policy.batch([item])
    assert torch.equal(policy.logps(batch)[0], batch.actions.old_logp_A)
    assert list(before.completion_logprobs) != list(after.completion_logprobs)


async def test_settings_that_no_trainer_repeats_are_refused():
    async with make_engine(bitwise=True) as engine:
        with pytest.raises(ConfigError, match="bitwise engine got repetition_penalty, min_tokens"):
            await ask(engine, [1], repetition_penalty=1.2, min_tokens=2)


def test_unsupported_model_is_refused_when_the_engine_is_made():
    with pytest.raises(NotBitwise, match="this is Gemma2ForCausalLM"):
        make_engine(new_model("gemma2-softcap"), bitwise=True)
