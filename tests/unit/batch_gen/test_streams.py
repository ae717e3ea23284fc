"""Task streams: what they draw, where they are after a resume, and when difficulty rises."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.batch_gen.requests.dataset import RequestBuilder
from ludic.batch_gen.requests.groups import GRPORequestStrategy, RequestStream
from ludic.batch_gen.requests.streams import (
    RisingDifficultyCurriculum,
    SampleStream,
    StreamRequests,
    first_samples,
    is_stream,
    read_or_generate,
)
from ludic.types import ConfigError, Rollout, UnknownName
from tests.unit.batch_gen.parts import request
from tests.unit.batch_gen.test_stitching import env_step

BUILDER = RequestBuilder(env_kind="counting", protocol_kind="play")


def sums(seed, difficulty=1):
    rng = random.Random(seed)
    while True:
        yield {"sum": [rng.randrange(10**difficulty) for _ in range(2)], "difficulty": difficulty}


def three(seed):
    yield from ({"number": number} for number in range(3))


class Counter:
    """An iterator that saves its own state."""

    made = 0

    def __init__(self, seed):
        type(self).made += 1
        self.number = seed

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return {"number": self.number}

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def stored(state):
    """As a checkpoint keeps it."""
    return json.loads(json.dumps(state))


def test_same_seed_gives_the_same_samples_and_another_seed_others():
    assert first_samples(sums, 20, seed=3) == first_samples(sums, 20, seed=3) != first_samples(sums, 20, seed=4)


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 12), beyond=st.integers(0, 12), fresh=st.booleans())
def test_restored_stream_continues_at_its_position(before, beyond, fresh):
    stream = SampleStream(sums, seed=1)
    for _ in range(before):
        stream.next_sample()
    state = stored(stream.state_dict())
    expected = [stream.next_sample() for _ in range(beyond + 1)]
    other = SampleStream(sums, seed=1) if fresh else stream  # forwards in a new process, backwards in this one
    other.load_state_dict(state)
    assert [other.next_sample() for _ in range(beyond + 1)] == expected


def test_stream_that_changed_is_refused_on_resume():
    stream = SampleStream(sums, seed=1)
    stream.next_sample()
    with pytest.raises(ConfigError, match="does not yield what it yielded before"):
        SampleStream(sums, seed=2).load_state_dict(stored(stream.state_dict()))
    with pytest.raises(ConfigError, match="another one"):
        SampleStream(three, seed=1).load_state_dict({"num_drawn": 9, "last_crc": 5})


def test_iterator_with_its_own_state_is_not_replayed():
    stream = SampleStream(Counter, seed=10)
    for _ in range(5):
        stream.next_sample()
    state, made = stored(stream.state_dict()), Counter.made
    other = SampleStream(Counter, seed=10)
    other.load_state_dict(state)
    assert other.next_sample() == {"number": 16} and other.num_drawn == 6 and Counter.made == made + 1


def test_groups_left_of_a_draw_are_drawn_again_after_a_resume():
    def opened():
        requests = StreamRequests(SampleStream(sums, seed=5), BUILDER, batch_size=4)
        return RequestStream(requests, GRPORequestStrategy(2, seed=5), {"requests": requests})

    def shown(groups):
        return [[(r.env.kwargs["sample"], r.env_seed, r.sampling_seed) for r in group] for group in groups]

    stream = opened()
    stream.take(6)
    state = stored(stream.state_dict())
    expected = shown(stream.take(7))
    other = opened()
    other.load_state_dict(state)
    assert shown(other.take(7)) == expected


def not_seeded():
    yield {}


def breaks(seed):
    yield {"number": 1}
    raise KeyError("no more words")


def yields_text(seed):
    yield "a question"


def yields_sets(seed):
    yield {"words": {1, 2}}


def needs_difficulty(seed, difficulty):
    yield {"difficulty": difficulty}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (not_seeded, "It takes `seed`"),
        (needs_difficulty, "Give `difficulty` a default"),
        (breaks, "failed after 1 samples: KeyError"),
        (yields_text, "a sample is a dict"),
        (yields_sets, "cannot be saved with its rollouts"),
    ],
)
def test_wrong_stream_is_explained(function, message):
    with pytest.raises(ConfigError, match=message):
        first_samples(function, 2, seed=0)


@pytest.mark.parametrize(
    ("place", "expected"),
    [("sums.py:stream", True), ("folder/sums.py:stream", True), ("my.package:stream", True), ("hub:name:split", False),
     ("hub:name", False), ("questions.jsonl", False), ("a/b.parquet", False)],
)  # fmt: skip
def test_functions_are_told_from_files(place, expected):
    assert is_stream(place) is expected


def test_named_function_generates_and_file_is_read(tmp_path):
    (tmp_path / "own.py").write_text(
        "def stream(seed):\n    n = seed\n    while True:\n        n += 1\n        yield {'n': n}\n"
    )
    assert read_or_generate(f"{tmp_path}/own.py:stream", num=2, seed=7) == [{"n": 8}, {"n": 9}]
    with pytest.raises(UnknownName, match="Did you mean 'stream'"):
        read_or_generate(f"{tmp_path}/own.py:strem", num=2, seed=7)
    (tmp_path / "q.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert len(read_or_generate(tmp_path / "q.jsonl", num=2, seed=7)) == 3


# --- rising difficulty ---


def rising(**given):
    def build(index, sample):
        return replace(request(env_seed=index), meta={"sample_index": index, "sample": sample})

    return RisingDifficultyCurriculum(sums, build, **{"batch_size": 4, "window": 4, "review": 0.0, **given})


def play(curriculum, reward):
    tasks = curriculum.next_requests()
    curriculum.observe(
        [Rollout(steps=[env_step(0, turn="t", reward=reward)], meta={"request_meta": dict(t.meta)}) for t in tasks]
    )
    return [(t.meta["difficulty"], t.meta["sample_index"], t.meta["sample"]["sum"]) for t in tasks]


def test_success_raises_difficulty_and_failure_lowers_it():
    curriculum = rising(last=3)
    levels = []
    for reward in (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0):
        play(curriculum, reward)
        levels.append(curriculum.difficulty)
    assert levels == [2, 3, 3, 3, 2, 1, 1, 1]
    assert curriculum.metrics() == {"difficulty": 1.0, "difficulty_success": 0.0}


def test_only_episodes_of_the_present_difficulty_count():
    curriculum = rising()
    old = curriculum.next_requests()
    play(curriculum, 1.0)
    assert curriculum.difficulty == 2
    curriculum.observe(
        [Rollout(steps=[env_step(0, turn="t", reward=1.0)], meta={"request_meta": dict(t.meta)}) for t in old]
    )
    assert curriculum.difficulty == 2 and curriculum.success_rate == 0.0


def test_share_of_the_tasks_reviews_lower_difficulties():
    curriculum = rising(review=0.5, batch_size=200, window=1)
    play(curriculum, 1.0)
    play(curriculum, 1.0)
    drawn = [level for level, _, _ in play(curriculum, 0.5)]
    assert 60 < drawn.count(3) < 140 and drawn.count(1) > 20 and drawn.count(2) > 20


@settings(max_examples=25, deadline=None)
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12), cut=st.integers(0, 11))
def test_resumed_curriculum_draws_what_it_would_have_drawn(rewards, cut):
    cut = min(cut, len(rewards))
    whole, first, second = rising(review=0.3), rising(review=0.3), rising(review=0.3)
    expected = [play(whole, reward) for reward in rewards]
    drawn = [play(first, reward) for reward in rewards[:cut]]
    second.load_state_dict(stored(first.state_dict()))
    drawn += [play(second, reward) for reward in rewards[cut:]]
    assert drawn == expected and second.state_dict() == whole.state_dict()
    numbers = [number for batch in drawn for _, number, _ in batch]
    assert numbers == list(range(len(numbers)))
