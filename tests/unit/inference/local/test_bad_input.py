"""What cannot work is refused with a message that helps; what breaks fails loudly, and nothing hangs."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ludic.inference.local import EngineClosed, LocalEngine, LogitsNotFinite, QueueFull, RequestAborted
from ludic.types import ConfigError, OutOfRoom, PromptTooLong, ReturnSpec
from tests.unit.inference.local.tiny_models import (
    VOCAB,
    Gate,
    ask,
    ask_all,
    eventually,
    extreme_settings,
    family_greedy,
    in_time,
    make_engine,
    new_model,
    request,
    shared_model,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

# --- requests that are refused ---

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    "prompt, settings, error, message",
    [
        ([], {}, ConfigError, "prompt is empty"),
        ([1, VOCAB], {}, ConfigError, r"ids from 1 to 128, but the model knows 0 to 127.*tokenizer"),
        ([-1, 2], {}, ConfigError, "ids from -1 to 2"),
        ([1] * 97, {}, PromptTooLong, r"97 of the prompt and max_tokens=16"),
        ([1] * 90, {"max_tokens": 7}, PromptTooLong, "limit is 96.*90 of the prompt and max_tokens=7"),
        ([1], {"max_tokens": 10_000}, PromptTooLong, "limit is 96"),
        ([1, 2], {"stop_token_ids": (5, VOCAB)}, ConfigError, r"stop_token_ids \[128\] are not in the vocabulary"),
        ([1, 2], {"stop_token_ids": (-1,)}, ConfigError, r"stop_token_ids \[-1\]"),
        ([1, 2], {"stop": "end"}, ConfigError, "stop.*tokenizer"),
    ],
)
async def test_a_request_that_cannot_work_is_refused_and_the_engine_lives(prompt, settings, error, message):
    async with make_engine(max_model_len=96) as engine:
        with pytest.raises(error, match=message):
            await ask(engine, prompt, **settings)
        assert engine.stats["kv_blocks_used"] == engine.stats["waiting"] == 0
        assert tokens(await ask(engine, [1, 2], max_tokens=3)) == family_greedy("llama", (1, 2), 16)[:3]


async def test_a_request_larger_than_the_cache_is_refused_and_one_as_large_is_served():
    async with make_engine(kv_tokens=32) as engine:
        with pytest.raises(PromptTooLong, match="limit is 32.*raise kv_tokens") as caught:
            await ask(engine, some_prompt(20), max_tokens=13)
        assert isinstance(caught.value, OutOfRoom), "an agent ends its episode by it"
        answer = await ask(engine, some_prompt(20), max_tokens=12)
    assert tokens(answer) == family_greedy("llama", some_prompt(20), 12)


@pytest.mark.parametrize("settings", [{"max_tokens": 0}, {"stop": [""]}, {"stop": ["end", ""]}], ids=str)
def test_impossible_sampling_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=rf"SamplingParams.{next(iter(settings))}="):
        request([1], **settings)


@pytest.mark.parametrize(
    "prompt, completion, settings, error, message",
    [
        ([], [1], {}, ConfigError, "at least one prompt token"),
        ([1], [VOCAB], {}, ConfigError, "the model knows 0 to 127"),
        ([1] * 90, [1] * 7, {}, PromptTooLong, "97 tokens, but the limit is 96"),
        ([1], [2], {"temperature": 0.0}, ConfigError, "temperature"),
    ],
)
async def test_scores_that_cannot_be_given_are_refused(prompt, completion, settings, error, message):
    async with make_engine(max_model_len=96) as engine:
        with pytest.raises(error, match=message):
            await in_time(engine.score_tokens(prompt, completion, **settings))
        assert len(await in_time(engine.score_tokens([1], [2, 3]))) == 2


async def test_an_eos_token_outside_the_vocabulary_does_no_harm():
    model = new_model()
    model.generation_config.eos_token_id = [VOCAB + 5, 3]
    async with make_engine(model) as engine:
        assert await ask(engine, [1, 2], min_tokens=4)


async def test_a_full_queue_refuses_and_serves_again_when_there_is_room():
    async with make_engine(new_model(), max_queue=3) as engine:
        gate = Gate(engine.model, at_call=1)
        first = [asyncio.create_task(ask(engine, [n + 1, 2])) for n in range(3)]
        await gate.reached()
        await eventually(lambda: engine.stats["waiting"] + engine.stats["running"] == 3)
        with pytest.raises(QueueFull, match=r"3 requests are already open \(max_queue=3\)"):
            await ask(engine, [9, 2])
        gate.open()
        assert len(await in_time(asyncio.gather(*first))) == 3
        assert len(await ask_all(engine, [request([n + 1, 2]) for n in range(3)])) == 3


@pytest.mark.parametrize("settings", [{"kv_tokens": 2}, {"block_size": 0}], ids=str)
def test_an_engine_that_cannot_work_is_refused(settings):
    with pytest.raises(ConfigError):
        make_engine(**settings)


# --- models that cannot be served ---


def test_a_misspelled_setting_is_refused_before_the_model_is_loaded():
    with pytest.raises(TypeError, match=r"LocalEngine\(\) got an unexpected keyword argument 'kv_token'"):
        LocalEngine("no such model", kv_token=64)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(ConfigError, match="Linear is not a transformers model"):
        make_engine(torch.nn.Linear(2, 2))


# --- cancelling ---


async def cancelled_at(gate: Gate, engine: LocalEngine, victim: "asyncio.Task[Any]") -> None:
    await gate.reached()
    victim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await victim
    gate.open()
    await eventually(lambda: engine.stats["kv_blocks_used"] == engine.stats["running"] == 0, "blocks come back")


async def test_a_request_cancelled_while_queued_leaves_the_queue():
    async with make_engine(new_model(), max_sequences=1) as engine:
        gate = Gate(engine.model, at_call=1)
        first = asyncio.create_task(ask(engine, [1, 2]))
        await gate.reached()
        second = asyncio.create_task(ask(engine, [3, 4], max_tokens=200))
        await eventually(lambda: engine.stats["waiting"] == 1)
        await cancelled_at(gate, engine, second)
        assert tokens(await first) == family_greedy("llama", (1, 2), 16)
        assert engine.stats["waiting"] == 0


@pytest.mark.parametrize(
    "at_call, settings", [(1, {}), (3, {"max_prefill_tokens": 8}), (6, {})], ids=["prefill", "later chunk", "decoding"]
)
async def test_a_request_cancelled_while_it_runs_gives_its_blocks_back(at_call, settings):
    async with make_engine(new_model(), **settings) as engine:
        gate = Gate(engine.model, at_call=at_call)
        await cancelled_at(gate, engine, asyncio.create_task(ask(engine, some_prompt(40), max_tokens=200)))
        assert tokens(await ask(engine, some_prompt(40))) == family_greedy("llama", some_prompt(40), 16)


async def test_abort_ends_open_requests_but_not_later_ones():
    async with make_engine(new_model(), max_sequences=2) as engine:
        gate = Gate(engine.model, at_call=2)
        tasks = [asyncio.create_task(ask(engine, [n + 1, 2], max_tokens=50)) for n in range(5)]
        await gate.reached()
        assert engine.abort() == 5
        gate.open()
        answers = await in_time(asyncio.gather(*tasks, return_exceptions=True))
        assert [type(answer) for answer in answers] == [RequestAborted] * 5
        await eventually(lambda: engine.stats["kv_blocks_used"] == engine.stats["running"] == 0)
        assert await ask(engine, [1, 2])


async def test_cancelling_a_score_does_no_harm():
    async with make_engine(new_model()) as engine:
        gate = Gate(engine.model, at_call=1)
        scores = [asyncio.create_task(engine.score_tokens([1, 2], [3, 4])) for _ in range(3)]
        await gate.reached()
        for score in scores[:2]:
            score.cancel()
        gate.open()
        assert len(await in_time(scores[2])) == 2
        assert len(await in_time(engine.score_tokens([1], [2]))) == 1


# --- crashes ---


class Bomb:
    """Makes the model raise from a chosen forward pass on."""

    def __init__(self, model: Any, *, at_call: int, error: BaseException) -> None:
        self._calls_left, self._error = at_call, error
        model.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, *_: Any) -> None:
        self._calls_left -= 1
        if self._calls_left <= 0:
            raise self._error


@pytest.mark.parametrize("at_call", [2, 3, 7])
@pytest.mark.parametrize(
    "error", [RuntimeError("the device is on fire"), torch.OutOfMemoryError("the device is on fire")], ids=repr
)
async def test_a_crash_in_the_worker_fails_all_requests_and_is_reported(at_call, error, caplog):
    engine = make_engine(new_model(), max_sequences=2)
    Bomb(engine.model, at_call=at_call, error=error)
    tasks = [asyncio.create_task(ask(engine, some_prompt(6 + n), max_tokens=100)) for n in range(5)]
    tasks.append(asyncio.create_task(asyncio.to_thread(asyncio.run, ask(engine, [1], max_tokens=100))))
    for answer in await in_time(asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(answer, EngineClosed) and "the device is on fire" in str(answer)
    assert "worker died" in caplog.text
    for late in (ask(engine, [1, 2]), engine.score_tokens([1], [2])):
        with pytest.raises(EngineClosed, match=f"has died: {type(error).__name__}: the device is on fire.*new one"):
            await in_time(late)
    with pytest.raises(EngineClosed, match="on fire"):
        engine.new_version()
    with pytest.raises(EngineClosed, match="on fire"):
        engine.pause()
    await in_time(asyncio.to_thread(engine.close))


async def test_a_crash_while_scoring_fails_all_waiting_scores():
    engine = make_engine(new_model())
    Bomb(engine.model, at_call=1, error=RuntimeError("the device is on fire"))
    tasks = [asyncio.create_task(engine.score_tokens([1, 2], [3, 4])) for _ in range(3)]
    for score in await in_time(asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(score, EngineClosed) and "on fire" in str(score)
    engine.close()


async def test_a_crash_fails_all_requests_even_if_the_scheduler_is_inconsistent():
    engine = make_engine(new_model())
    gate = Gate(engine.model, at_call=3)
    tasks = [asyncio.create_task(ask(engine, some_prompt(9 + n), max_tokens=50)) for n in range(4)]
    await gate.reached()
    for sequence in engine._worker.scheduler.running.values():
        sequence.blocks.append(10**6)  # no such block
    gate.open()
    answers = await in_time(asyncio.gather(*tasks, return_exceptions=True))
    assert all(isinstance(answer, EngineClosed) for answer in answers)
    engine.close()


# --- settings at their limits ---


@pytest.mark.parametrize("greedy", [False, True])
async def test_settings_at_their_limits_draw_tokens_and_leave_the_neighbours_alone(greedy):
    everything = tuple(range(VOCAB))  # a prompt that every penalty applies to
    settings = [
        {"temperature": 1.0, **setting, **({"temperature": 0.0} if greedy else {})}
        for setting in extreme_settings(VOCAB, length=16)
    ]
    async with make_engine() as engine:
        extreme = [request(everything, seed=n, **setting) for n, setting in enumerate(settings)]
        answers = await ask_all(engine, [*extreme, *(request(some_prompt(5 + n)) for n in range(6))])
        assert engine.failure is None
    for answer in answers:
        assert all(0 <= token < VOCAB for token in tokens(answer)) and np.isfinite(answer.completion_logprobs).all()
    assert [tokens(answer) for answer in answers[len(extreme) :]] == [
        family_greedy("llama", some_prompt(5 + n), 16) for n in range(6)
    ]


@pytest.mark.parametrize("top_p", [1e-50, 5e-324, 1e-7])
async def test_a_tiny_top_p_draws_the_likeliest_token(top_p):
    async with make_engine() as engine:
        answer = await ask(engine, (1, 2), temperature=1.0, top_p=top_p, seed=3)
    assert tokens(answer) == family_greedy("llama", (1, 2), 16) and not answer.completion_logprobs.any()


async def test_a_request_that_forbids_every_token_is_refused():
    model = new_model()
    model.generation_config.eos_token_id = 0
    everything = {"stop_token_ids": tuple(range(1, VOCAB)), "min_tokens": 1}
    async with make_engine(model) as engine:
        with pytest.raises(ConfigError, match="all 128 tokens of the vocabulary are stop tokens; drop min_tokens"):
            await ask(engine, [1, 2], **everything)
        answer = await ask(engine, [1, 2], **everything, ignore_eos=True, max_tokens=1)
        assert tokens(answer) == [0], "the only one that is left"
        assert len(tokens(await ask(engine, [1, 2], stop_token_ids=tuple(range(VOCAB))))) == 1


async def test_a_tokenizer_that_fails_ends_its_request_alone():
    class Failing:
        eos_token_id = None

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            raise IndexError("piece id is out of range")

    async with make_engine(tokenizer=Failing()) as engine:
        bad = asyncio.create_task(engine.complete_tokens(request([1, 2], stop="end")))
        with pytest.raises(IndexError, match="out of range"):
            await in_time(bad)
        assert engine.failure is None and engine.stats["kv_blocks_used"] == 0
        assert len(await in_time(engine.score_tokens([1], [2]))) == 1


async def test_a_model_that_reads_more_ids_than_it_writes_takes_every_setting():
    model = new_model()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB - 8, bias=False)
    async with make_engine(model) as engine:
        answer = await ask(
            engine, [1, VOCAB - 3], repetition_penalty=1.5, min_tokens=3, stop_token_ids=(VOCAB - 5, 7), max_tokens=8
        )
        assert max(tokens(answer)) < VOCAB - 8


@pytest.mark.parametrize("wanted", [True, False])
async def test_candidates_are_kept_only_if_requested(wanted):
    asked = request([1, 2], temperature=1.0, top_p=0.999, seed=1)
    asked.return_ = ReturnSpec(return_chosen_logprobs=True, return_candidates=wanted)
    async with make_engine() as engine:
        response, _ = await engine.complete_tokens(asked)
    assert (response.candidates is not None) == wanted and len(response.completion_logprobs) == 16


# --- logits that are not finite ---


def model_broken_at(token: int) -> Any:
    """As `shared_model`, but what follows this token is NaN; the weights are finite, or the engine would refuse them."""
    model = new_model()
    model.get_input_embeddings().register_forward_hook(
        lambda module, ids, rows: rows.masked_fill((ids[0] == token)[..., None], float("nan"))
    )
    return model


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
async def test_logits_that_are_not_finite_fail_their_request_alone(settings):
    prompts = [p for n in range(5, 17) if 5 not in [*(p := some_prompt(n)), *family_greedy("llama", p, 16)]]
    assert len(prompts) > 5
    async with make_engine(model_broken_at(5)) as engine:
        bad = asyncio.create_task(ask(engine, [1, 2, 5], **settings))
        answers = await ask_all(engine, [request(prompt) for prompt in prompts])
        with pytest.raises(LogitsNotFinite, match=r"after 3 tokens are not finite \(policy version 0\).*learning rate"):
            await bad
        with pytest.raises(LogitsNotFinite):
            await ask(engine, [1, 2, 5])
        assert engine.stats["kv_blocks_used"] == engine.stats["running"] == 0 and engine.failure is None
        answers += await ask_all(engine, [request(prompt) for prompt in prompts])
    assert [tokens(answer) for answer in answers] == 2 * [family_greedy("llama", prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("at", ["prompt", "decoding"])
async def test_a_request_that_fails_leaves_its_neighbours_bit_for_bit_as_one_that_ends_there(at):
    """The same batches are computed, so that every machine must give the same numbers."""
    others = [request(some_prompt(4 + n), temperature=1.0, top_p=0.95, seed=n) for n in range(5)]
    async with make_engine() as engine:
        used = {t for answer in await ask_all(engine, others) for t in [*answer.prompt_token_ids, *tokens(answer)]}
    firsts = {n: family_greedy("llama", some_prompt(n), 1)[0] for n in range(9, 20)}
    length, token = next((n, token) for n, token in firsts.items() if token not in {*used, *some_prompt(n)})
    prompt = (*some_prompt(length), token) if at == "prompt" else some_prompt(length)
    answers = []
    for model in (model_broken_at(-1), model_broken_at(token)):
        async with make_engine(model) as engine:
            # With a sound model it ends by its length, in the step in which the broken one fails.
            victim = request(prompt, temperature=0.0, max_tokens=1 if at == "prompt" else 2)
            engine.pause()
            asked = [asyncio.ensure_future(engine.complete_tokens(r)) for r in (victim, *others)]
            await asyncio.sleep(0)
            engine.resume()
            answers.append(await in_time(asyncio.gather(*asked, return_exceptions=True)))
    (ended, *expected), (failed, *found) = answers
    assert isinstance(failed, LogitsNotFinite) and not isinstance(ended, BaseException)
    for (one, _), (other, _) in zip(expected, found, strict=True):
        assert tokens(one) == tokens(other) and one.text == other.text
        np.testing.assert_array_equal(one.completion_logprobs, other.completion_logprobs)


async def test_a_broken_request_leaves_no_nan_in_a_reused_row():
    """It fails while decoding, and the shorter one behind it moves up: what lies beyond its own end is masked, but NaN."""
    first, second = some_prompt(40), some_prompt(6)
    token = family_greedy("llama", first, 1)[0]
    expected = family_greedy("llama", second, 30)
    assert token not in [*first, *second, *expected]
    async with make_engine(model_broken_at(token)) as engine:
        engine.pause()
        broken, whole = (asyncio.create_task(ask(engine, p, max_tokens=30)) for p in (first, second))
        await asyncio.sleep(0)
        engine.resume()
        with pytest.raises(LogitsNotFinite, match="after 41 tokens"):
            await broken
        assert tokens(await whole) == expected


async def test_scores_that_are_not_finite_fail_their_text_alone():
    async with make_engine(model_broken_at(5)) as engine:
        scores = [engine.score_tokens([1, 2, last], [3, 4]) for last in (5, 6)]
        bad, good = await in_time(asyncio.gather(*scores, return_exceptions=True))
        assert isinstance(bad, LogitsNotFinite) and len(good) == 2


# --- shutting down ---


async def test_closing_fails_open_requests_and_refuses_new_ones():
    engine = make_engine(new_model(), max_sequences=2)
    gate = Gate(engine.model, at_call=3)
    tasks = [asyncio.create_task(ask(engine, some_prompt(4 + n), max_tokens=200)) for n in range(4)]
    await gate.reached()
    tasks.append(asyncio.create_task(engine.score_tokens([1], [2])))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    # Otherwise what is open might be done before the engine hears of its end.
    await eventually(lambda: engine._worker.is_closed)
    gate.open()
    await in_time(closing)
    for answer in await in_time(asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(answer, EngineClosed) and "shut down" in str(answer)
    with pytest.raises(EngineClosed, match="shut down"):
        await ask(engine, [1, 2])
    assert engine.stats["kv_blocks_used"] == 0
    engine.close()


async def test_an_engine_closes_while_it_is_paused():
    engine = make_engine()
    engine.pause()
    waiting = asyncio.create_task(ask(engine, [1, 2]))
    await eventually(lambda: engine.stats["waiting"] == 1)
    await in_time(asyncio.to_thread(engine.close))
    with pytest.raises(EngineClosed):
        await in_time(waiting)
    engine.resume()


# --- several users ---


async def test_several_event_loops_use_one_engine():
    prompts = [some_prompt(3 + n) for n in range(6)]
    engine = make_engine()
    answers: dict[int, list[list[int]]] = {}

    def user(number: int) -> None:
        asyncio.run(work(number))

    async def work(number: int) -> None:
        got = await ask_all(engine, [request(prompt) for prompt in prompts[number % 2 :: 2]])
        answers[number] = [tokens(answer) for answer in got]

    threads = [threading.Thread(target=user, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    await work(4)
    for thread in threads:
        await in_time(asyncio.to_thread(thread.join))
    for number in range(5):
        assert answers[number] == [family_greedy("llama", prompt, 16) for prompt in prompts[number % 2 :: 2]]
    engine.close()


async def test_a_loop_that_ends_with_open_requests_does_not_hurt_the_engine():
    async def leave_early() -> None:
        left_open = asyncio.ensure_future(engine.complete_tokens(request([1, 2], max_tokens=100)))
        await asyncio.sleep(0.02)
        assert not left_open.done()

    async with make_engine() as engine:
        await asyncio.to_thread(asyncio.run, leave_early())
        assert tokens(await ask(engine, [5, 6])) == family_greedy("llama", (5, 6), 16)
        await eventually(lambda: engine.stats["kv_blocks_used"] == 0)


async def test_two_engines_share_one_model():
    async with make_engine() as one, make_engine() as two:
        answers = await asyncio.gather(*(ask(engine, some_prompt(4 + n)) for n in range(4) for engine in (one, two)))
    expected = [family_greedy("llama", some_prompt(4 + n), 16) for n in range(4) for _ in range(2)]
    assert [tokens(answer) for answer in answers] == expected
    assert shared_model() is one.model is two.model


@pytest.mark.slow
def test_a_process_that_does_not_close_the_engine_ends_cleanly():
    program = """
import asyncio, threading
from tests.unit.inference.local.tiny_models import ask, make_engine, new_model
engine = make_engine(new_model())
threading.Thread(target=lambda: asyncio.run(ask(engine, [1, 2], max_tokens=200)), daemon=True).start()
asyncio.run(ask(engine, [3, 4], max_tokens=5))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
