import asyncio
import errno
import gzip
import os
import threading
import time
import tracemalloc

import pytest

from ludic import registry
from ludic.batch_gen import GRPORequestStrategy, RolloutEngine
from ludic.batch_gen.episodes import Episode, EpisodePlan
from ludic.batch_gen.store import FinishedEpisodes, RolloutWriter, request_key
from ludic.inference import ScriptedClient
from ludic.interaction import MultiAgentProtocol
from ludic.types import (
    ConfigError,
    EnvContractError,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    ReturnSpec,
    Rollout,
    RolloutRequest,
    SamplingParams,
    VLLMExtensions,
    load_rollouts,
)
from ludic.util import files
from ludic.util.files import read_lines, repair
from ludic.util.line_writer import LineWriter
from tests.fakes import make_agent
from tests.unit.batch_gen.parts import RL, TotalReward, make_engine, request, summary


class Counting(ScriptedClient):
    def __init__(self) -> None:
        super().__init__(lambda request: "<a>even</a>")
        self.num_calls = 0

    async def complete_tokens(self, request):
        self.num_calls += 1
        return await super().complete_tokens(request)


async def test_every_rollout_is_a_line_with_its_tokens(tmp_path):
    path = tmp_path / "deep" / "rollouts.jsonl"
    rollouts = await make_engine(jsonl_path=path).generate_rollouts([request() for _ in range(5)], max_steps=1)
    stored = {r.id: r for r in load_rollouts(path)}
    assert stored.keys() == {r.id for r in rollouts}
    for rollout in rollouts:
        assert stored[rollout.id].to_json() == rollout.to_json()
        assert stored[rollout.id].agent_steps[0].trace == rollout.agent_steps[0].trace


async def test_a_file_is_appended_to_and_failed_episodes_are_in_it(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    for _ in range(2):
        engine = make_engine(jsonl_path=path, max_retries=0)
        await engine.generate_rollouts([request(), request(env={"fail_on": 1})], max_steps=1)
    stored = list(load_rollouts(path))
    assert len(stored) == 4 and sum(r.failure is not None for r in stored) == 2


async def test_a_resumed_run_plays_only_what_is_missing_and_gives_the_same_result(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    requests = [request(), request(env_seed=3, num_episodes=2), request(), request()]
    whole = await make_engine(client=Counting()).generate_rollouts(requests, max_steps=1)
    await make_engine(client=Counting(), jsonl_path=path).generate_rollouts(requests[:2], max_steps=1)
    client = Counting()
    progress = []
    engine = make_engine(client, jsonl_path=path, resume=True, on_progress=progress.append)
    resumed = await engine.generate_rollouts(requests, max_steps=1)
    assert client.num_calls == 2 and summary(resumed) == summary(whole)
    assert progress[-1].num_resumed == 3 and progress[-1].num_done == 5
    assert len(list(load_rollouts(path))) == 5
    again = make_engine(client, jsonl_path=path, resume=True)
    batch = await again.generate_batch(requests, max_steps=1, credit_assigner=TotalReward())
    assert client.num_calls == 2 and len(batch) == 5


async def test_a_group_that_was_finished_in_two_runs_is_one_group_in_the_batch_and_in_the_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"

    def members():
        return GRPORequestStrategy(4).expand([request(), request()])  # new group ids in every run

    await make_engine(jsonl_path=path).generate_rollouts(members()[:6], max_steps=1)
    engine = make_engine(jsonl_path=path, resume=True)
    batch = await engine.generate_batch(members(), max_steps=1, credit_assigner=TotalReward())
    groups = [item.origin.group_id for item in batch.items]
    assert groups == [groups[0]] * 4 + [groups[4]] * 4 and groups[0] != groups[4]
    assert sorted(r.meta["request_meta"]["group_id"] for r in load_rollouts(path)) == sorted(groups)


@pytest.mark.parametrize(
    "other",
    [
        {"env_seed": 2},
        {"sampling_seed": 2},
        {"kind": "counting"},
        {"inference": None},
        {"env": {"fail_on": None}},
    ],
)
async def test_another_request_is_not_taken_for_a_finished_one(tmp_path, other):
    path = tmp_path / "rollouts.jsonl"
    await make_engine(jsonl_path=path).generate_rollouts([request(env_seed=1, sampling_seed=1)], max_steps=1)
    client = Counting()
    changed = request(**{"env_seed": 1, "sampling_seed": 1, **other})
    await make_engine(client, jsonl_path=path, resume=True).generate_rollouts([changed], max_steps=1)
    assert client.num_calls == 1


async def test_failed_episodes_are_played_again(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    broken = request(env={"fail_on": 1}, env_seed=1, sampling_seed=1)
    settings = {"max_retries": 0, "max_failed_share": 1, "jsonl_path": path}
    await make_engine(**settings).generate_rollouts([broken], max_steps=1)
    client = Counting()
    await make_engine(client, resume=True, **settings).generate_rollouts([broken], max_steps=1)
    assert client.num_calls == 1


async def test_an_episode_of_which_only_a_part_was_written_is_played_again(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    game = RolloutRequest(env=EnvSpec("prisoners_dilemma", {"rounds": 1}), protocol=ProtocolSpec("duel"), inference=RL)

    def engine(**settings):
        ids = registry.envs.make("prisoners_dilemma").agent_ids
        replies = ScriptedClient(lambda request: "<a>C</a>")
        return RolloutEngine(
            protocol_registry={"duel": lambda: MultiAgentProtocol({i: make_agent(replies) for i in ids})},
            jsonl_path=path,
            **settings,
        )

    await engine().generate_rollouts([game], max_steps=2)
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + second[: len(second) // 2])
    assert FinishedEpisodes(path).completed_ids == set()
    rollouts = await engine(resume=True).generate_rollouts([game], max_steps=2)
    assert len(rollouts) == 2 and len(list(load_rollouts(path))) == 3
    assert len(FinishedEpisodes(path).completed_ids) == 1


async def test_requests_that_cannot_be_recognised_again_are_written_but_not_resumed(tmp_path):
    path = tmp_path / "x.jsonl"
    odd = [request(env={"fail_on": object()}), request(), request()]
    rollouts = await make_engine(jsonl_path=path, max_retries=0).generate_rollouts(odd, max_steps=1)
    assert len(list(load_rollouts(path))) == len(rollouts) == 3
    with pytest.raises(ConfigError, match="not all JSON"):
        await make_engine(jsonl_path=path, resume=True).generate_rollouts(odd, max_steps=1)


async def test_the_event_loop_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    threads = []
    original = Rollout.to_json

    def to_json(self):
        threads.append(threading.current_thread())
        return original(self)

    monkeypatch.setattr(Rollout, "to_json", to_json)
    await make_engine(jsonl_path=tmp_path / "x.jsonl").generate_rollouts([request() for _ in range(4)], max_steps=1)
    assert len(threads) == 4 and len(set(threads)) == 1 and threads[0] is not threading.main_thread()


async def test_writing_survives_a_new_event_loop(tmp_path):
    writer = RolloutWriter(tmp_path / "x.jsonl")
    plan = EpisodePlan(index=0, request=request(), env_seed=0, sampling_seed=0)

    def write() -> None:
        asyncio.run(writer.write(Episode(plan=plan, rollouts=[Rollout(meta={"engine": {}})])))

    await asyncio.to_thread(write)
    await asyncio.to_thread(write)
    assert len(list(load_rollouts(tmp_path / "x.jsonl"))) == 2


def an_episode(number: int = 0, **meta) -> Episode:
    plan = EpisodePlan(index=number, request=request(), env_seed=0, sampling_seed=0)
    return Episode(plan=plan, rollouts=[Rollout(meta={"engine": {}, "number": number, **meta})])


async def test_an_episode_that_is_not_json_fails_alone(tmp_path):
    writer = RolloutWriter(tmp_path / "x.jsonl")
    episodes = [an_episode(0), an_episode(1), an_episode(2, thing=object()), an_episode(3)]
    answers = await asyncio.gather(*map(writer.write, episodes), return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None), type(None), EnvContractError, type(None)]
    assert [rollout.meta["number"] for rollout in load_rollouts(tmp_path / "x.jsonl")] == [0, 1, 3]


async def test_a_task_that_is_cancelled_while_it_waits_does_not_disturb_the_others(tmp_path):
    writer = RolloutWriter(tmp_path / "x.jsonl")
    tasks = [asyncio.create_task(writer.write(an_episode(number))) for number in range(8)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [number == 3 for number in range(8)]
    assert {rollout.meta["number"] for rollout in load_rollouts(tmp_path / "x.jsonl")} >= {0, 1, 2, 4, 5, 6, 7}


def test_the_key_of_a_request_stays_the_same_so_that_old_files_can_be_resumed():
    sampling = SamplingParams(temperature=0.6, stop=("a", "b"), stop_token_ids=(3,))
    extensions = VLLMExtensions(max_think=7, extra_body_overrides={"b": 1, "a": [2]})
    asked = RolloutRequest(
        env=EnvSpec("gsm8k", {"sample": {"question": "é?", "answer": "#### 3"}}),
        protocol=ProtocolSpec("play", {"model": "m"}),
        inference=InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl(), extensions=extensions),
    )
    plan = EpisodePlan(index=0, request=asked, env_seed=1, sampling_seed=2)
    assert request_key(plan, max_steps=3) == "d5b88e8d0290b0e0d4f831fa3ee64e79"


# --- compressed files -------------------------------------------------------------------------------------------


def texts(path):
    return [text for _, text in read_lines(path)]


def lines_of(*numbers):
    return [f'{{"n": {number}, "same": "{"x" * 200}"}}\n'.encode() for number in numbers]


def test_a_compressed_file_is_whole_after_every_append_and_standard_tools_read_it(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    writer = LineWriter(path)
    written = b""
    for line in lines_of(*range(3000)):
        writer.append(line)
        written += line
        if len(written) % 7 == 0:
            assert gzip.decompress(path.read_bytes()) == written
    assert gzip.decompress(path.read_bytes()) == written
    assert path.stat().st_size < len(written) / 10


def test_lines_of_a_file_made_by_gzip_are_found_again_without_a_pass_for_each(tmp_path):
    path = tmp_path / "x.jsonl.gz"  # one member of 20 MB
    written = [f'{{"n": {number}, "same": "{"x" * 5000}"}}\n'.encode() for number in range(4000)]
    path.write_bytes(gzip.compress(b"".join(written), 1))
    start = time.perf_counter()
    found = [line for line, _ in read_lines(path)]
    one_pass = time.perf_counter() - start
    assert [line.read() for line in found] == written
    for number in (3999, 0, 2000, 1999):
        assert found[number].read() == written[number]
    start = time.perf_counter()
    for line in found[-100:]:
        line.read()
    assert time.perf_counter() - start < 20 * one_pass


def test_a_small_compressed_file_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(160):
            file.write(b" " * (1 << 20))
        file.write(b"\n" + b'{"n": 1}\n')
    tracemalloc.start()
    (_, long), (line, text) = read_lines(path)
    assert len(long) == files.MAX_LINE_BYTES + 1 and text == b'{"n": 1}\n'
    del long
    assert line.read() == text
    assert tracemalloc.get_traced_memory()[1] < 4 * files.MAX_LINE_BYTES
    tracemalloc.stop()


def test_writers_take_turns_on_one_compressed_file(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    one, other = LineWriter(path), LineWriter(path)
    written = lines_of(*range(9))
    for number, line in enumerate(written):
        (one if number % 3 else other).append(line)
    assert texts(path) == written and gzip.decompress(path.read_bytes()) == b"".join(written)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_wherever_a_write_was_broken_off_readers_skip_the_rest_and_the_next_writer_goes_on(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    writer = LineWriter(path)
    written = lines_of(1, 2, 3)
    for line in written[:2]:
        writer.append(line)
    before = path.read_bytes()
    writer.append(written[2])
    after = path.read_bytes()
    start = next((n for n in range(len(before)) if before[n] != after[n]), len(before))
    for cut in range(start, len(after) + 1):
        path.write_bytes(after[:cut])  # as a kill in the middle of the last write leaves it
        read = [text.rstrip() + b"\n" for text in texts(path)]
        assert read in (written[:2], written), f"what earlier writes have ended is not lost ({cut})"
        LineWriter(path).append(lines_of(4)[0])
        assert texts(path) == [*read, *lines_of(4)], cut


def test_a_write_that_failed_half_way_does_not_spoil_the_next(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl.gz"
    writer = LineWriter(path)
    writer.append(lines_of(1)[0])
    real, calls = os.pwrite, []

    def full_disk(fd, data, place):
        calls.append(place)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data[:5], place)

    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(OSError, match=r"Could not write .*No space left on device\. \d+ MiB are free") as full:
        writer.append(lines_of(2)[0])
    monkeypatch.undo()
    writer.append(lines_of(3)[0])
    assert texts(path) == lines_of(1, 3) and full.value.errno == errno.ENOSPC


def test_fuzz_damage_in_a_compressed_file_costs_the_lines_of_its_member_only(tmp_path, monkeypatch, caplog, fuzz):
    monkeypatch.setattr("ludic.util.line_writer.MEMBER_BYTES", 1000)
    path = tmp_path / "x.jsonl.gz"
    writer, written = LineWriter(path), lines_of(*range(40))
    for line in written:
        writer.append(line)
    whole = path.read_bytes()
    member_of = {text: line.member for line, text in read_lines(path)}
    starts = sorted(set(member_of.values()))
    assert len(starts) == 8
    for case in range(fuzz.cases(150)):
        rng = fuzz.rng(case)
        content = bytearray(whole)
        place = rng.randrange(len(content))
        length = min(rng.choice([1, 1, 1, 4, 40]), len(content) - place)
        kind = rng.choice(["bit", "zeros", "noise", "cut out"])
        if kind == "bit":
            content[place] ^= 1 << rng.randrange(8)
        elif kind == "cut out":
            del content[place : place + length]
        else:
            content[place : place + length] = bytes(length) if kind == "zeros" else rng.randbytes(length)
        path.write_bytes(content)
        hurt = [a for a, b in zip(starts, [*starts[1:], len(whole)], strict=True) if a < place + length and place < b]
        caplog.clear()
        found = texts(path)
        is_last = (
            starts[-1] in hurt
        )  # if its end is missing, it could be a write that goes on now, and has no checksum yet
        assert is_last or [text for text in found if text in member_of] == found, f"{kind} at {place}. {fuzz.at(case)}"
        assert {text for text in written if member_of[text] not in hurt} <= set(found), (
            f"{kind} at {place}. {fuzz.at(case)}"
        )
        assert len(found) == 40 or caplog.messages or is_last, f"{kind} at {place}. {fuzz.at(case)}"
        LineWriter(path).append(lines_of(99)[0])
        assert texts(path)[-1:] == lines_of(99), f"{kind} at {place}. {fuzz.at(case)}"
        assert is_last or texts(path)[:-1] == found, f"{kind} at {place}. {fuzz.at(case)}"


@pytest.mark.parametrize(
    "damaged", [b"\n", b"\x00" * 50, b'{"format": 1, "id"', b"[]", b'{"id": "x"}', b'{"format": 2}', b"\xff"]
)
async def test_a_damaged_line_is_played_again_when_resumed(tmp_path, caplog, damaged):
    path = tmp_path / "rollouts.jsonl"
    requests = [request() for _ in range(4)]
    whole = await make_engine(client=Counting(), jsonl_path=path).generate_rollouts(requests, max_steps=1)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damaged, *lines[2:]]) + b"\n")
    client = Counting()
    resumed = await make_engine(client, jsonl_path=path, resume=True).generate_rollouts(requests, max_steps=1)
    assert client.num_calls == 1 and summary(resumed) == summary(whole)
    assert len(list(load_rollouts(path))) == 4
    assert not damaged.strip() or any("1 damaged lines are left out. Line 2" in message for message in caplog.messages)


async def test_a_killed_run_is_resumed_from_a_compressed_file(tmp_path):
    path = tmp_path / "rollouts.jsonl.gz"
    requests = [request() for _ in range(6)]
    whole = await make_engine(client=Counting()).generate_rollouts(requests, max_steps=1)
    await make_engine(client=Counting(), jsonl_path=path).generate_rollouts(requests[:4], max_steps=1)
    path.write_bytes(path.read_bytes()[:-40])  # in the middle of the fourth
    client = Counting()
    resumed = await make_engine(client, jsonl_path=path, resume=True).generate_rollouts(requests, max_steps=1)
    assert client.num_calls == 3 and summary(resumed) == summary(whole)
    assert len(list(load_rollouts(path))) == 6


async def test_identical_requests_are_counted_not_merged(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    twin = request(env_seed=1, sampling_seed=1)
    await make_engine(jsonl_path=path).generate_rollouts([twin], max_steps=1)
    client = Counting()
    rollouts = await make_engine(client, jsonl_path=path, resume=True).generate_rollouts([twin] * 3, max_steps=1)
    assert client.num_calls == 2 and len({r.id for r in rollouts}) == 3


async def test_a_write_error_stops_the_run(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(OSError):
        await make_engine(jsonl_path=tmp_path / "x.jsonl").generate_rollouts([request()], max_steps=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n'),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a"', b""),
        (b"", b""),
        (b'{"a": 1}\n' + b'{"b": "' + b"x" * 200_000, b'{"a": 1}\n'),
    ],
)
def test_the_next_writer_repairs_the_last_line(tmp_path, before, after):
    path = tmp_path / "x.jsonl"
    path.write_bytes(before)
    repair(path)
    assert path.read_bytes() == after


def test_a_damaged_end_is_skipped_and_cut(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    LineWriter(path).append(lines_of(1)[0])
    path.write_bytes(path.read_bytes() + b"\x00" * 500)  # what a power cut can leave
    assert texts(path) == lines_of(1)
    LineWriter(path).append(lines_of(2)[0])
    assert texts(path) == lines_of(1, 2)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_of_a_line_beyond_the_bound_the_beginning_is_read_and_the_next_is_found(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 64)
    path = tmp_path / f"x.{suffix}"
    short, long = b'{"n": 1}\n', b'"' + b"x" * 5000 + b'"\n'
    LineWriter(path).append(short + long + short)
    (_, first), (cut, beginning), (last, text) = read_lines(path, longest=100)
    assert first == text == short and beginning == long[:100] + b"\n"
    assert cut.length == len(long) and last.read() == short
