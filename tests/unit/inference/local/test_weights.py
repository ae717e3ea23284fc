"""New weights: no token comes from what the old ones computed, and requests live through the change."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from ludic.types import ConfigError, NotFinite, TokenTrace
from tests.unit.inference.local.tiny_models import (
    Gate,
    ask,
    ask_all,
    copy_of,
    eventually,
    greedy,
    in_time,
    make_engine,
    new_model,
    plain_logprobs,
    request,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

NUM_NEW = 24
PROMPTS = [some_prompt(length) for length in (2, 13, 30)]


def requests(max_tokens: int = 6):
    return [request(prompt, max_tokens=max_tokens) for prompt in PROMPTS]


def by_transformers(model, max_tokens: int = 6):
    reference = copy_of(model)
    return [greedy(reference, prompt, max_tokens) for prompt in PROMPTS]


async def answers(engine):
    return [tokens(answer) for answer in await ask_all(engine, requests())]


def change(model, seed: int = 1) -> None:
    """In place, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.mark.parametrize("family", ["llama-mha-tied", "gemma3-sliding"])
async def test_after_sync_weights_everything_comes_from_the_new_weights(family):
    model, other = new_model(family), new_model(family, seed=9)
    async with make_engine(model) as engine:
        assert await answers(engine) == by_transformers(model)
        assert engine.sync_weights(dict(other.named_parameters())) == "1"
        for _ in range(2):  # once computed, once out of the new cache
            assert await answers(engine) == by_transformers(other) == by_transformers(model)
        np.testing.assert_allclose(
            await engine.score_tokens(PROMPTS[0], PROMPTS[1]),
            plain_logprobs(copy_of(other), PROMPTS[0], PROMPTS[1]),
            atol=1e-4,
        )


async def test_after_a_change_in_place_a_new_version_forgets_what_was_computed():
    model = new_model()
    async with make_engine(model) as engine:
        old = await answers(engine)
        reused = engine.stats["prefix_tokens_reused"]
        change(model)
        assert engine.new_version() == 1
        assert await answers(engine) == by_transformers(model) != old
        assert engine.stats["prefix_tokens_reused"] == reused, "nothing of the old cache was used"
        with engine.updating():
            change(model, seed=2)
        assert await answers(engine) == by_transformers(model)
        assert engine.version == await engine.get_policy_version() == engine.stats["policy_version"] == 2


@pytest.mark.parametrize("version", [7, "7", None])
async def test_a_version_can_be_named(version):
    async with make_engine(new_model(), version=3) as engine:
        assert (await ask(engine, PROMPTS[0])).version_runs == ((3, 16),)
        committed = engine.sync_weights({}, version=version)
        assert committed == str(engine.version) == ("4" if version is None else "7")
        assert (await ask(engine, PROMPTS[0])).version_runs == ((int(committed), 16),)


async def test_going_back_to_an_old_version_number_does_not_bring_back_its_cache():
    model = new_model()
    async with make_engine(model) as engine:
        await answers(engine)
        for version in (1, 0):
            change(model, seed=version)
            engine.new_version(version)
            assert await answers(engine) == by_transformers(model)


async def test_partial_weights_change_only_what_they_name():
    model = new_model()
    async with make_engine(model) as engine:
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        engine.sync_weights({"lm_head.weight": torch.flip(before["lm_head.weight"], [0])})
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert changed == {"lm_head.weight"}
        assert await answers(engine) == by_transformers(model)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"model.nothing.weight": torch.zeros(1)}, r"unknown names \['model.nothing.weight'\]"),
        ({"lm_head.weight": torch.zeros(3, 3)}, r"wrong shapes \['lm_head.weight'\]"),
        ({"model.norm.weight": np.zeros(32, dtype=object)}, "model.norm.weight"),
        ({"model.norm.weight": "not a tensor"}, "model.norm.weight"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_and_nothing_changes(bad, message):
    model = new_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    good = {"model.embed_tokens.weight": torch.zeros_like(model.model.embed_tokens.weight)}
    async with make_engine(model) as engine:
        old = await answers(engine)
        with pytest.raises(ConfigError, match=message):
            engine.sync_weights({**good, **bad})
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        assert engine.version == 0 and await answers(engine) == old


async def test_numpy_weights_and_other_dtypes_are_taken():
    model, other = new_model(), new_model(seed=9)
    async with make_engine(model) as engine:
        engine.sync_weights({name: p.double().numpy() for name, p in other.named_parameters()})
        assert await answers(engine) == by_transformers(other)


async def test_non_finite_weights_leave_no_trace_in_later_versions():
    """They are finite, what they compute is not: the cache is full of NaN."""
    model = new_model()
    good = {name: parameter.clone() for name, parameter in model.named_parameters()}
    async with make_engine(model) as engine:
        engine.sync_weights({name: p * (1e38 if "_proj" in name else 1.0) for name, p in good.items()})
        with pytest.raises(NotFinite, match="logits"):
            await ask_all(engine, requests(max_tokens=20))
        engine.sync_weights(good)
        assert await answers(engine) == by_transformers(model)


async def test_a_failed_update_still_ends_the_old_version():
    """The weights may be half changed; what was computed from the old ones must not be mixed with them."""
    model = new_model()
    async with make_engine(model) as engine:
        await answers(engine)
        with pytest.raises(RuntimeError, match="half way"), engine.updating():
            change(model)
            raise RuntimeError("half way")
        assert await answers(engine) == by_transformers(model)
        assert engine.version == 1


# --- in the middle of generation ---


@pytest.mark.parametrize("at_call", [3, 8])
async def test_requests_survive_an_update_and_continue_under_the_new_weights(at_call):
    model = new_model()
    old = copy_of(model)
    async with make_engine(model, max_prefill_tokens=20) as engine:
        gate = Gate(model, at_call=at_call)
        running = asyncio.create_task(ask_all(engine, requests(max_tokens=NUM_NEW)))
        await gate.reached()
        values = dict(new_model(seed=9).named_parameters())
        update = threading.Thread(target=engine.sync_weights, args=(values,))
        update.start()
        await eventually(lambda: engine._worker.num_pauses == 1)  # so the change comes right after this step
        gate.open()
        finished = await in_time(running)
        update.join(30)
        assert engine.version == 1 and engine.stats["kv_blocks_used"] == 0
    new = copy_of(model)
    num_switched = 0
    for prompt, answer in zip(PROMPTS, finished, strict=True):
        written = tokens(answer)
        assert len(written) == sum(run.length for run in answer.version_runs) == NUM_NEW
        trace = TokenTrace(prompt, written, answer.completion_logprobs, version_runs=answer.version_runs)
        assert [run.version for run in trace.version_runs] in ([0, 1], [1])
        under_old = sum(run.length for run in answer.version_runs if run.version == 0)
        num_switched += 0 < under_old < NUM_NEW
        assert written[:under_old] == greedy(old, prompt, NUM_NEW)[:under_old]
        assert written[under_old:] == greedy(new, [*prompt, *written[:under_old]], NUM_NEW - under_old)
        plain = [
            *plain_logprobs(old, prompt, written)[:under_old],
            *plain_logprobs(new, prompt, written)[under_old:],
        ]
        np.testing.assert_allclose(answer.completion_logprobs, plain, atol=1e-4)
    assert num_switched, "the update was to fall into the middle"


async def test_a_paused_engine_samples_nothing():
    async with make_engine(new_model()) as engine:
        engine.pause()
        engine.pause()
        waiting = asyncio.create_task(ask(engine, PROMPTS[0]))
        await eventually(lambda: engine.stats["waiting"] == 1)
        engine.resume()
        await asyncio.sleep(0.05)
        assert not waiting.done() and engine.stats["running"] == 0, "paused twice, resumed once"
        engine.resume()
        assert len((await in_time(waiting)).completion_token_ids) == 16


async def test_the_cache_can_be_released_between_and_during_requests():
    model = new_model()
    async with make_engine(model) as engine:
        expected = by_transformers(model)
        assert await answers(engine) == expected
        engine.release_cache()
        engine.release_cache()
        assert await answers(engine) == expected and engine.version == 0
        gate = Gate(model, at_call=4)
        engine.release_cache()  # the engine's modules are rebuilt, with the gate
        running = asyncio.create_task(ask_all(engine, requests()))
        await gate.reached()
        release = threading.Thread(target=engine.release_cache)
        release.start()
        gate.open()
        assert [tokens(answer) for answer in await in_time(running)] == expected
        release.join(30)


# --- unannounced changes ---


async def test_an_unannounced_optimizer_step_begins_a_version(caplog):
    model = new_model()
    async with make_engine(model) as engine:
        await answers(engine)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        assert await answers(engine) == by_transformers(model)
        assert engine.version == 1 and "changed without notice" in caplog.text


async def test_a_model_in_training_mode_is_sampled_without_dropout():
    model = new_model(attention_dropout=0.5)
    expected = by_transformers(model)
    model.train()
    async with make_engine(model) as engine:
        assert await answers(engine) == expected
    assert model.training


async def test_an_adapter_put_around_the_model_later_is_served_from_the_next_version():
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    model = new_model()
    async with make_engine(model) as engine:
        before = await answers(engine)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.5)
        engine.new_version()
        after = await answers(engine)
        assert after == by_transformers(model) and after != before


@pytest.mark.parametrize("asked", [{"dtype": torch.float16}, {"device": "meta"}], ids=str)
def test_a_model_object_is_not_converted(asked):
    with pytest.raises(ConfigError, match="served unchanged"):
        make_engine(new_model(), **asked)


# --- weights and logits that are not finite ------------------------------------------------------------------------


def with_nan(model, name: str = "model.layers.1.self_attn.q_proj.weight"):
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = float("nan")
    return model


def test_a_model_that_is_not_finite_is_not_served():
    with pytest.raises(NotFinite, match=r"cannot be served.*in model\.layers\.1\.self_attn\.q_proj\.weight"):
        make_engine(with_nan(new_model()))


async def test_weights_that_are_not_finite_are_not_copied():
    model, other = new_model(), with_nan(new_model(seed=9), "model.embed_tokens.weight")
    async with make_engine(model) as engine:
        with pytest.raises(NotFinite, match=r"in model\.embed_tokens\.weight\. Nothing was changed"):
            engine.sync_weights(dict(other.named_parameters()))
        assert engine.version == 0 and await answers(engine) == by_transformers(model)


async def test_requests_fail_while_shared_weights_are_not_finite_and_work_under_the_next():
    """Also one that was running, and those that are scored."""
    model = new_model()
    whole = copy_of(model)
    async with make_engine(model) as engine:
        running = asyncio.ensure_future(ask(engine, PROMPTS[1], max_tokens=200))
        await eventually(lambda: engine.stats["running"] == 1)
        with engine.updating():
            with_nan(model)
        for asked in (running, ask(engine, PROMPTS[0]), engine.score_tokens(PROMPTS[0], PROMPTS[1])):
            with pytest.raises(NotFinite, match=r"weights of version 1 are not finite.*layers\.1\.self_attn\.q_proj"):
                await in_time(asked)
        assert engine.stats["running"] == engine.stats["waiting"] == engine.stats["kv_blocks_used"] == 0
        engine.sync_weights(dict(whole.named_parameters()))
        assert await answers(engine) == by_transformers(whole)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
async def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine(sampling):
    """Finite weights, as a step that is far too long leaves them, whose products are not."""
    model = new_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 3e38
        model.lm_head.weight[7] = 3e38
        model.model.layers[0].mlp.up_proj.weight[0] = 3e38
    async with make_engine(model) as engine:
        with pytest.raises(NotFinite, match=r"logits.*not finite.*lower the learning rate"):
            await ask(engine, [1, 2, 5], seed=1, **sampling)
        with pytest.raises(NotFinite, match="logits"):
            await engine.score_tokens([1, 2, 5], [3, 4])
        assert engine.failure is None
