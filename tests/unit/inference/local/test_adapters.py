"""One engine, several LoRA adapters: each request gets what its adapter alone would give, and no other is touched."""

import asyncio
import platform
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.inference.local import LogitsNotFinite
from ludic.models.adapters import AdapterSpec
from ludic.types import ConfigError
from tests.unit.inference.local.tiny_models import (
    VOCAB,
    make_engine,
    new_model,
    request,
    shared_model,
    some_prompt,
)

pytest.importorskip("peft", reason="the lora extra is not installed")

from tests.unit.models.adapters.peft_reference import peft_model, tuned

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c"]


def adapters_for(model):
    specs = [
        AdapterSpec(rank=4, seed=0),
        AdapterSpec(rank=2, seed=1, head=False),
        AdapterSpec(rank=3, seed=2, mlp=False),
    ]
    return {name: tuned(model, spec, seed) for seed, (name, spec) in enumerate(zip(NAMES, specs, strict=True))}


def engine_with(model, adapters, **options):
    engine = make_engine(model, adapters=True, **options)
    for name, adapter in adapters.items():
        engine.add_adapter(name, adapter)
    return engine


def asked(prompt, adapter, **sampling):
    return replace(request(prompt, seed=7, **sampling), adapter=adapter)


async def answers(engine, requests):
    """Together in one batch. An exception is an answer."""
    engine.pause()
    tasks = [asyncio.create_task(engine.complete_tokens(r)) for r in requests]
    await asyncio.sleep(0)
    engine.resume()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [one if isinstance(one, BaseException) else one[0] for one in found]


def same(one, other):
    """Tokens and log-probabilities: on aarch64 bit for bit; other math libraries may round by the number of rows."""
    tolerance = 0 if platform.machine() == "aarch64" else 1e-4
    return np.array_equal(one.completion_token_ids, other.completion_token_ids) and np.allclose(
        one.completion_logprobs, other.completion_logprobs, rtol=0, atol=tolerance
    )


@torch.no_grad()
def check_greedy(theirs, prompt, answer):
    """Each token is the most probable one of peft's model after those before it, with its log-probability."""
    completion = answer.completion_token_ids.tolist()
    logits = theirs(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    assert completion == logits.argmax(-1).tolist()
    expected = logits.float().log_softmax(-1).amax(-1)
    np.testing.assert_allclose(answer.completion_logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2-softcap", "phi-output-bias"])
async def test_mixed_batch_answers_as_peft_does_for_each_adapter(family):
    model = new_model(family)
    adapters = adapters_for(model)
    engine = engine_with(model, adapters)
    prompts = [some_prompt(length, seed) for seed, length in enumerate((5, 9, 3, 14))]
    owners = [None, *NAMES]
    found = await answers(engine, [asked(p, owner, max_tokens=8) for p in prompts for owner in owners])
    engine.close()
    models = {None: model, **{name: peft_model(model, adapter) for name, adapter in adapters.items()}}
    expected = [(models[owner], p) for p in prompts for owner in owners]
    for answer, (theirs, prompt) in zip(found, expected, strict=True):
        check_greedy(theirs, prompt, answer)


@pytest.mark.parametrize("length", [11, 150], ids=["short prompt", "prompt with a shared row"])
async def test_equal_prompts_under_different_adapters_share_nothing(length):
    """At once, and one after the other over a warm cache: the bits of an engine that has served no other."""
    model, prompt = shared_model(), some_prompt(length)
    adapters = adapters_for(model)
    engine, owners = engine_with(model, adapters), [None, *NAMES]
    together = await answers(engine, [asked(prompt, owner, temperature=1.0) for owner in owners for _ in range(2)])
    reused = engine.stats["prefix_tokens_reused"]
    later = [(await answers(engine, [asked(prompt, owner, temperature=1.0)]))[0] for owner in owners]
    assert engine.stats["prefix_tokens_reused"] - reused == 4 * ((length - 1) // 4 * 4), "each finds its own blocks"
    engine.close()
    for number, owner in enumerate(owners):
        alone = engine_with(model, adapters)
        (expected,) = await answers(alone, [asked(prompt, owner, temperature=1.0)])
        assert alone.stats["prefix_tokens_reused"] == 0
        alone.close()
        assert same(together[2 * number], expected) and same(together[2 * number + 1], expected)
        assert same(later[number], expected)


async def test_adapter_added_again_under_a_name_does_not_find_the_blocks_of_the_old_one():
    model, prompt = shared_model(), some_prompt(20)
    adapters = adapters_for(model)
    engine = engine_with(model, {"a": adapters["a"]})
    await answers(engine, [asked(prompt, "a")])
    engine.remove_adapter("a")
    with pytest.raises(ConfigError, match=r"no adapter 'a'. Added adapters: none"):
        await engine.complete_tokens(asked(prompt, "a"))
    engine.add_adapter("a", adapters["b"])
    (found,) = await answers(engine, [asked(prompt, "a")])
    assert engine.stats["prefix_tokens_reused"] == 0
    engine.close()
    check_greedy(peft_model(model, adapters["b"]), prompt, found)


async def test_adapters_come_and_go_while_others_decode():
    model = shared_model()
    adapters = adapters_for(model)
    engine = engine_with(model, {"a": adapters["a"]})
    long = [asked(some_prompt(6, seed), "a", max_tokens=100, temperature=1.0) for seed in range(3)]
    expected = await answers(engine, long)
    tasks = [asyncio.create_task(engine.complete_tokens(r)) for r in long]
    async for chunk in engine.stream_tokens(asked(some_prompt(9), "a", max_tokens=60, temperature=1.0)):
        if len(engine.adapters) == 1 and not chunk.response:
            engine.add_adapter("b", adapters["b"])
            tasks.append(asyncio.create_task(engine.complete_tokens(asked(some_prompt(6), "b", max_tokens=40))))
            await asyncio.sleep(0)  # the request is there
            engine.remove_adapter("a")
            engine.remove_adapter("b")
            engine.add_adapter("c", adapters["c"])
            engine.add_adapter("d", adapters["b"])
    found = [response for response, _ in await asyncio.gather(*tasks)]
    assert list(engine.adapters) == ["c", "d"] and engine.version == 0 and engine.stats["preemptions"] == 0
    engine.close()
    assert all(same(one, other) for one, other in zip(found, expected, strict=False))
    check_greedy(peft_model(model, adapters["b"]), some_prompt(6), found[3])


async def test_trained_adapter_is_copied_when_it_is_added():
    model, prompt = shared_model(), some_prompt(5)
    trained = adapters_for(model)["a"]
    engine = engine_with(model, {"a": trained})
    theirs = peft_model(model, trained)
    with torch.no_grad():
        trained.flat.fill_(1.0)
    (found,) = await answers(engine, [asked(prompt, "a")])
    engine.close()
    check_greedy(theirs, prompt, found)


@settings(max_examples=6, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.sampled_from([None, *NAMES, "bad"]), st.sampled_from([4, 9, 140]), st.integers(1, 6)),
        min_size=1,
        max_size=7,
    ),
    value=st.sampled_from([float("nan"), float("inf")]),
)
def test_bad_adapter_fails_alone_and_others_are_served_as_without_it(jobs, value):
    """In a batch, on the cache and rows that the failed ones leave, and after them: the same bits."""
    model = shared_model()
    adapters = adapters_for(model)
    bad = tuned(model, AdapterSpec(rank=2, seed=5))
    with torch.no_grad():
        bad.flat.fill_(value)

    async def run():
        engine, alone = (engine_with(model, {**adapters, "bad": bad}, max_sequences=4) for _ in range(2))
        requests = [asked(some_prompt(n), owner, max_tokens=new, temperature=1.0) for owner, n, new in jobs]
        first, second = await answers(engine, requests), await answers(engine, requests[::-1])
        for r, one, other in zip(requests, first, second[::-1], strict=True):
            if r.adapter == "bad":
                assert isinstance(one, LogitsNotFinite) and isinstance(other, LogitsNotFinite)
                with pytest.raises(LogitsNotFinite):
                    await engine.score_prompt(r.prompt_token_ids, adapter="bad")
            else:
                (expected,) = await answers(alone, [r])
                assert same(one, expected) and same(other, expected)
        engine.close()
        alone.close()

    asyncio.run(run())


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
async def test_score_prompt_gives_log_probs_top_k_and_targets_of_the_adapter(family):
    model = new_model(family)
    adapters = adapters_for(model)
    engine = engine_with(model, adapters)
    tokens = np.array(some_prompt(12))
    targets = np.random.default_rng(0).integers(-1, VOCAB, size=(11, 3))
    jobs = [(None, 0, None), ("a", 5, targets), ("c", VOCAB, None), ("b", 1, targets[:, :1])]
    found = await asyncio.gather(
        *(engine.score_prompt(tokens, top_k=k, targets=own, adapter=name) for name, k, own in jobs)
    )
    scored = await engine.score_tokens(tokens[:4], tokens[4:], adapter="a")
    np.testing.assert_allclose(scored, found[1].logprobs[3:], atol=1e-5)
    engine.close()
    for scores, (name, k, own) in zip(found, jobs, strict=True):
        theirs = model if name is None else peft_model(model, adapters[name])
        with torch.no_grad():
            logps = theirs(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1].float().log_softmax(-1)
        expected = logps.gather(-1, torch.from_numpy(tokens)[1:, None])[:, 0]
        np.testing.assert_allclose(scores.logprobs, expected, atol=2e-4)
        assert scores.top_ids.shape == scores.top_logprobs.shape == (11, k)
        np.testing.assert_allclose(scores.top_logprobs, logps.topk(k).values, atol=2e-4)
        np.testing.assert_allclose(
            scores.top_logprobs, logps.gather(-1, torch.from_numpy(scores.top_ids.astype(np.int64))), atol=2e-4
        )
        if own is not None:
            wanted = logps.gather(-1, torch.from_numpy(own).clamp(min=0)) * torch.from_numpy(own >= 0)
            np.testing.assert_allclose(scores.target_logprobs, wanted, atol=2e-4)
        else:
            assert scores.target_logprobs.shape == (11, 0)


async def test_mistakes_are_named():
    model = shared_model()
    adapters = adapters_for(model)
    engine = engine_with(model, adapters)
    with pytest.raises(ConfigError, match=r"no adapter 'z'. Added adapters: a, b, c"):
        await engine.complete_tokens(asked((1, 2), "z"))
    with pytest.raises(ConfigError, match="already"):
        engine.add_adapter("a", adapters["b"])
    with pytest.raises(ConfigError, match="no adapter 'z'"):
        engine.remove_adapter("z")
    other = tuned(new_model(hidden_size=16), AdapterSpec(rank=2, seed=0))
    with pytest.raises(ConfigError, match="another model"):
        engine.add_adapter("other", other)
    for wrong, words in [
        ({"top_k": VOCAB + 1}, "vocabulary"),
        ({"targets": [[1]]}, r"\(2, K\)"),
        ({"targets": [[1], [VOCAB]]}, "-1 is none"),
    ]:
        with pytest.raises(ConfigError, match=words):
            await engine.score_prompt((1, 2, 3), **wrong)
    with pytest.raises(ConfigError, match="two tokens"):
        await engine.score_prompt((1,))
    engine.close()
    plain = make_engine(model)
    with pytest.raises(ConfigError, match="adapters=True"):
        await plain.complete_tokens(asked((1, 2), "a"))
    plain.close()
    with pytest.raises(ConfigError, match="record_experts"):
        make_engine(model, adapters=True, record_experts=True)


async def test_layers_that_are_not_packed_follow_weights_that_are_replaced():
    model, prompt = new_model(), some_prompt(9)
    adapter = adapters_for(model)["a"]
    expected = engine_with(new_model(seed=1), {"a": adapter}, pack_weights=False)
    engine = engine_with(model, {"a": adapter}, pack_weights=False)
    (before,) = await answers(engine, [asked(prompt, "a")])
    for own, other in zip(model.parameters(), new_model(seed=1).parameters(), strict=True):
        own.data = other.data
    engine.new_version()
    (after,) = await answers(engine, [asked(prompt, "a")])
    assert same(after, (await answers(expected, [asked(prompt, "a")]))[0]) and not same(after, before)
    engine.close()
    expected.close()
