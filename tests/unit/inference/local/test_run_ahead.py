"""An engine whose device runs ahead: steps are launched before the tokens of the last one are read. The device is a fake that
draws token = f(seed, position), so every answer is known beforehand."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from ludic.inference.local import LocalEngine, RequestAborted
from ludic.inference.local.sequence import Sampled
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest
from tests.unit.inference.local.tiny_models import new_model

VOCAB = 50
ROUNDS = 4


def token_at(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % VOCAB


class Device:
    """Samples without the host: it knows where each sequence stands, and refuses one that it does not hold."""

    runs_ahead = True

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        self.num_unread = self.most_unread = 0

    def prefill(self, chunks):
        ended = [chunk.sequence for chunk in chunks if chunk.reaches_the_end]
        for sequence in ended:
            self.positions[sequence.number] = len(sequence.tokens)
        return self._reading([(s, [token_at(s.seed, len(s.tokens))], [-1.0]) for s in ended])

    def decode(self, sequences, num_rounds):
        sampled = []
        for sequence in sequences:
            first = self.positions[sequence.number] + 1
            self.positions[sequence.number] += num_rounds
            tokens = [token_at(sequence.seed, first + i) for i in range(num_rounds)]
            sampled.append((sequence, tokens, [-1.0] * num_rounds))
        return self._reading(sampled)

    def _reading(self, sampled: list[Sampled]) -> Callable[[], list[Sampled]]:
        self.num_unread += 1
        self.most_unread = max(self.most_unread, self.num_unread)

        def read() -> list[Sampled]:
            time.sleep(0.0005)  # a step takes time, so that tests reach a running engine
            self.num_unread -= 1
            return sampled

        return read

    def keep(self, sequence): ...

    def leave(self, sequence):
        self.positions.pop(sequence.number, None)

    def weights_changed(self):
        assert self.num_unread == 0, "tokens of the old weights are unread"


def make_engine(kv_tokens: int = 4096, **settings):
    engine = LocalEngine(
        new_model("llama", vocab_size=VOCAB), max_model_len=256, kv_tokens=kv_tokens, block_size=4, **settings
    )
    engine._worker.scheduler.limits = replace(engine._worker.scheduler.limits, max_rounds=ROUNDS)
    device = Device()
    engine._worker._make_runner = lambda: device
    return engine, device


def request(seed: int, num_prompt: int, max_tokens: int, **sampling) -> TokenCompletionRequest:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling})
    return TokenCompletionRequest(
        model="", prompt_token_ids=[seed % 40 + 3] * num_prompt, sampling=params, return_=ReturnSpec.for_rl(), seed=seed
    )


def expected(asked: TokenCompletionRequest) -> list[int]:
    start = len(asked.prompt_token_ids)
    tokens = [token_at(asked.seed, start + i) for i in range(asked.sampling.max_tokens)]
    stops = [i for i, token in enumerate(tokens) if token in asked.sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


def mixed_requests() -> list[TokenCompletionRequest]:
    return [
        request(seed, 1 + seed * 5 % 23, 1 + seed * 7 % 40, stop_token_ids=(9, 20) if seed % 2 else ())
        for seed in range(1, 40)
    ]


@pytest.mark.parametrize("kv_tokens", [4096, 120])
async def test_requests_of_unequal_lengths_get_their_own_tokens(kv_tokens):
    engine, device = make_engine(kv_tokens)
    asked = mixed_requests()
    async with engine:
        answers = await asyncio.gather(*(engine.complete_tokens(one) for one in asked))
        assert [answer.completion_token_ids.tolist() for answer, _ in answers] == [expected(one) for one in asked]
        assert device.most_unread > 1, "the device never ran ahead"
        assert (engine.stats["preemptions"] > 0) == (kv_tokens == 120)
        assert engine.stats["kv_blocks_used"] == 0


async def test_every_token_has_the_version_that_sampled_it():
    engine, _ = make_engine()
    asked = mixed_requests()
    async with engine:
        tasks = [asyncio.ensure_future(engine.complete_tokens(one)) for one in asked]
        for version in range(1, 6):
            await asyncio.sleep(0.002)
            await asyncio.to_thread(engine.new_version, version)
        for one, (answer, _) in zip(asked, await asyncio.gather(*tasks), strict=True):
            assert answer.completion_token_ids.tolist() == expected(one)
            assert sum(run.length for run in answer.version_runs) == len(answer.completion_token_ids)
            versions = [run.version for run in answer.version_runs]
            assert versions == sorted(set(versions))


async def test_a_pause_returns_only_when_every_token_is_read():
    engine, device = make_engine()
    wait_for_work = engine._worker._wait_for_work

    def wait_late() -> bool:
        time.sleep(0.002)  # time for a pause between two steps
        return wait_for_work()

    engine._worker._wait_for_work = wait_late
    async with engine:
        task = asyncio.ensure_future(engine.complete_tokens(request(1, 3, 200)))
        await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.to_thread(engine.pause)
            assert device.num_unread == 0
            engine.resume()
        assert (await task)[0].completion_token_ids.tolist() == expected(request(1, 3, 200))


async def test_a_cancelled_request_leaves_the_others_alone():
    engine, _ = make_engine()
    asked = [request(seed, 5, 200) for seed in range(1, 9)]
    async with engine:
        tasks = [asyncio.ensure_future(engine.complete_tokens(one)) for one in asked]
        await asyncio.sleep(0.002)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for one, answer in list(zip(asked, answers, strict=True))[1::2]:
            assert answer[0].completion_token_ids.tolist() == expected(one)
        assert engine.stats["kv_blocks_used"] == 0


async def test_admission_that_keeps_room_changes_no_token_and_preempts_less():
    num_preemptions = []
    for keep_room in (False, True):
        engine, _ = make_engine(120, keep_room=keep_room)
        asked = mixed_requests()
        async with engine:
            answers = await asyncio.gather(*(engine.complete_tokens(one) for one in asked))
            assert [answer.completion_token_ids.tolist() for answer, _ in answers] == [expected(one) for one in asked]
            num_preemptions.append(engine.stats["preemptions"])
    assert num_preemptions[1] < num_preemptions[0]


async def test_an_abort_fails_what_is_in_flight_and_the_engine_goes_on():
    engine, _ = make_engine()
    async with engine:
        task = asyncio.ensure_future(engine.complete_tokens(request(1, 5, 240)))
        while not engine.stats["running"] and not task.done():
            await asyncio.sleep(0)
        engine.abort()
        with pytest.raises(RequestAborted):
            await task
        answer, _ = await engine.complete_tokens(request(2, 5, 9))
        assert answer.completion_token_ids.tolist() == expected(request(2, 5, 9))


async def test_a_prompt_that_continues_a_finished_reply_reuses_only_tokens_that_were_read():
    engine, _ = make_engine()
    async with engine:
        first = request(3, 5, 40, stop_token_ids=(9, 20))
        answer, _ = await engine.complete_tokens(first)
        history = [*first.prompt_token_ids.tolist(), *answer.completion_token_ids.tolist()]
        before = engine.stats["prefix_tokens_reused"]
        await engine.complete_tokens(replace(first, prompt_token_ids=[*history, 7, 8]))
        assert engine.stats["prefix_tokens_reused"] - before == (len(history) - 1) // 4 * 4
