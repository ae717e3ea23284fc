import asyncio
import json
import queue

import pytest

from ludic.batch_gen import (
    GRPORequestStrategy,
    MixedRequests,
    RequestsExhausted,
    make_dataset_queue_requests_fn,
    make_dataset_sequence_requests_fn,
    make_requests_fn_from_queue,
)
from ludic.types import ConfigError
from tests.unit.batch_gen.parts import RL, request

# --- strategies ---


def test_a_group_shares_its_env_seed_and_id_and_samples_differently():
    members = GRPORequestStrategy(4).expand([request(meta={"task": "t"}, num_episodes=9)])
    assert len(members) == 4 and {m.num_episodes for m in members} == {1}
    assert len({m.env_seed for m in members}) == 1 and len({m.sampling_seed for m in members}) == 4
    assert len({m.meta["group_id"] for m in members}) == 1 and {m.meta["task"] for m in members} == {"t"}


def test_given_seeds_are_the_base_of_the_groups():
    first, second = (GRPORequestStrategy(3).expand([request(env_seed=5, sampling_seed=6)]) for _ in range(2))
    assert {m.env_seed for m in first} == {5}
    assert [m.sampling_seed for m in first] == [m.sampling_seed for m in second]
    assert first[0].meta["group_id"] != second[0].meta["group_id"]


def test_groups_go_on_where_they_were_after_a_resume():
    whole = GRPORequestStrategy(2, seed=3)
    whole.expand([request(), request()])
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = GRPORequestStrategy(2, seed=3)
    resumed.load_state_dict(state)
    one, other = whole.expand([request()]), resumed.expand([request()])
    assert [(m.env_seed, m.sampling_seed) for m in one] == [(m.env_seed, m.sampling_seed) for m in other]
    assert one[0].env_seed != GRPORequestStrategy(2, seed=3).expand([request()])[0].env_seed


# --- queues ---


@pytest.mark.parametrize("make_queue", [queue.Queue, asyncio.Queue])
def test_a_queue_is_emptied_batch_by_batch(make_queue):
    q = make_queue()
    for seed in range(5):
        q.put_nowait(seed)
    next_requests = make_requests_fn_from_queue(q, batch_size=2, build_request=lambda seed: request(env_seed=seed))
    assert [[r.env_seed for r in next_requests()] for _ in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(RequestsExhausted):
        next_requests()


def test_an_empty_queue_may_also_give_nothing():
    next_requests = make_requests_fn_from_queue(
        queue.Queue(), batch_size=2, build_request=lambda _: request(), on_empty="return_empty"
    )
    assert next_requests() == []
    with pytest.raises(ConfigError, match="on_empty='wait'"):
        make_requests_fn_from_queue(queue.Queue(), batch_size=2, build_request=request, on_empty="wait")


def test_each_sample_of_a_queue_becomes_a_request():
    q = queue.Queue()
    q.put((7, {"question": "?"}))
    next_requests = make_dataset_queue_requests_fn(
        q,
        batch_size=4,
        env_kind="qa",
        protocol_kind="single",
        inference=RL,
        protocol_kwargs={"max_tokens": 5},
        request_meta_fn=lambda index, sample: {"length": len(sample["question"])},
    )
    (made,) = next_requests()
    assert made.env.kind == "qa" and made.env.kwargs == {"sample": {"question": "?"}}
    assert made.protocol.kind == "single" and made.protocol.kwargs == {"max_tokens": 5}
    assert (made.env_seed, made.sampling_seed, made.inference) == (7, 7, RL)
    assert made.meta == {"sample_index": 7, "length": 1}


@pytest.mark.parametrize(
    ("seed_fn", "seed"),
    [
        (lambda index, sample: len(sample), 3),
        (lambda *given: len(given), 2),
        (lambda index: index + 100, 107),
        (lambda index, offset=5: index + offset, 12),
        (hash, 7),
    ],
)
def test_seed_functions_get_index_and_sample(seed_fn, seed):
    settings = {
        "batch_size": 1,
        "env_kind": "e",
        "protocol_kind": "p",
        "env_seed_fn": seed_fn,
        "sampling_seed_fn": seed_fn,
    }
    q = queue.Queue()
    q.put((7, "abc"))
    sequence = make_dataset_sequence_requests_fn(["abc"] * 8, **settings)
    for made in (make_dataset_queue_requests_fn(q, **settings)()[0], [sequence() for _ in range(8)][7][0]):
        assert (made.env_seed, made.sampling_seed) == (seed, seed)


# --- sequences ---


def dataset(samples="abcde", **settings):
    return make_dataset_sequence_requests_fn(
        list(samples), **{"batch_size": 3, "env_kind": "e", "protocol_kind": "p", **settings}
    )


def drawn(requests) -> list[str]:
    return [r.env.kwargs["sample"] for r in requests]


def test_a_sequence_gives_endless_requests():
    next_requests = dataset()
    assert [drawn(next_requests()) for _ in range(4)] == [list("abc"), list("dea"), list("bcd"), list("eab")]
    assert next_requests.epoch == 2


def test_shuffled_passes_are_whole_and_differ_and_repeat_from_the_seed():
    def passes(seed):
        next_requests = dataset("abcdefgh", batch_size=8, shuffle=True, rng_seed=seed)
        return [drawn(next_requests()) for _ in range(3)]

    first = passes(1)
    assert all(sorted(one) == list("abcdefgh") for one in first)
    assert len({tuple(one) for one in first}) == 3
    assert passes(1) == first != passes(2)


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_resumed_sequence_goes_on_exactly(group_size):
    def facts(requests):
        return [(r.env.kwargs["sample"], r.env_seed, r.sampling_seed) for r in requests]

    settings = {"shuffle": True, "rng_seed": 5, "group_size": group_size}
    whole = dataset(**settings)
    for _ in range(3):
        whole()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = dataset(**settings)
    resumed.load_state_dict(state)
    assert [facts(whole()) for _ in range(4)] == [facts(resumed()) for _ in range(4)]


def test_several_kinds_of_requests_can_be_mixed_and_resumed():
    def mixed():
        return MixedRequests(dataset("abcde", batch_size=2), dataset("xyz", batch_size=1))

    whole = mixed()
    assert drawn(whole()) == ["a", "b", "x"]
    resumed = mixed()
    resumed.load_state_dict(whole.state_dict())
    assert drawn(whole()) == drawn(resumed()) == ["c", "d", "y"]


def test_groups_with_neighbouring_seeds_share_no_sampling_seed():
    """Counting up from the base would make seed 7 of one group seed 0 of the group seven further on."""
    members = GRPORequestStrategy(8).expand([request(sampling_seed=index) for index in range(50)])
    assert len({m.sampling_seed for m in members}) == 400


def test_a_second_pass_samples_with_new_seeds_in_the_same_worlds():
    next_requests = dataset("ab", batch_size=2)
    first, second = next_requests(), next_requests()
    assert [r.env_seed for r in first] == [r.env_seed for r in second] == [0, 1]
    assert {r.sampling_seed for r in first}.isdisjoint(r.sampling_seed for r in second)
