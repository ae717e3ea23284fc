"""Who computes what next: a scheduler driven by hand, without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.inference.local.blocks import BlockPool
from ludic.inference.local.scheduler import CompletionLengths, Limits, Plan, Scheduler
from ludic.inference.local.sequence import Sequence
from ludic.types import SamplingParams, TokenCompletionRequest

SIZE = 4


def make_scheduler(
    num_blocks: int = 64,
    *,
    max_sequences: int = 8,
    max_prefill_tokens: int = 1000,
    max_rounds: int = 1,
    copies_prompts: bool = False,
) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, SIZE), Limits(max_sequences, max_prefill_tokens, max_rounds, copies_prompts))


def make_sequence(number: int, prompt: list[int] | int, max_tokens: int = 8) -> Sequence:
    """A prompt given as a length has tokens that no other prompt shares."""
    ids = prompt if isinstance(prompt, list) else [1000 * number + n for n in range(prompt)]
    request = TokenCompletionRequest(
        model="m", prompt_token_ids=ids, sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0)
    )
    return Sequence(number=number, request=request, deliver=lambda sequence, error: None, seed=number)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.waiting.append(sequence)


def step(scheduler: Scheduler) -> tuple[dict[int, int], list[int], list[int]]:
    """One step as the engine does it on a CPU: ({sequence: prompt tokens computed}, decoded ones, preempted ones)."""
    plan = scheduler.plan()
    check(scheduler, plan)
    read(scheduler, launch(scheduler, plan))
    prefilled = {chunk.sequence.number: chunk.length for chunk in plan.prefill}
    return prefilled, [s.number for s in plan.decode], [s.number for s in plan.preempted]


def launch(scheduler: Scheduler, plan: Plan) -> list[tuple[Sequence, int]]:
    """(sequence, tokens that the plan samples for it)."""
    sampled = [(chunk.sequence, 1) for chunk in plan.prefill if chunk.reaches_the_end]
    sampled += [(sequence, plan.num_rounds) for sequence in plan.decode]
    scheduler.launched(plan)
    return sampled


def read(scheduler: Scheduler, sampled: list[tuple[Sequence, int]], stop_at: int = 99) -> None:
    """Append the tokens; a sequence ends at its limit, or by a stop token as its `stop_at`-th."""
    for sequence, num_sampled in sampled:
        if sequence.number not in scheduler.running:
            continue
        limit = min(sequence.sampling.max_tokens, stop_at)
        num_read = min(num_sampled, limit - len(sequence.logprobs))
        for _ in range(num_read):
            sequence.append(7, -1.0, scheduler.version)
        if len(sequence.logprobs) == limit:
            sequence.finish_reason = "length"
        if sequence.finish_reason:
            scheduler.remove(sequence)


def check(scheduler: Scheduler, plan: Plan) -> None:
    """What must hold of every plan."""
    planned = [chunk.sequence for chunk in plan.prefill] + plan.decode
    assert len({s.number for s in planned}) == len(planned), "no sequence is computed twice in a step"
    assert all(scheduler.running[s.number] is s for s in planned)
    assert sum(chunk.length for chunk in plan.prefill) <= scheduler.limits.max_prefill_tokens
    assert len(scheduler.running) <= scheduler.limits.max_sequences
    for chunk in plan.prefill:
        assert chunk.start == chunk.sequence.num_computed and chunk.end <= len(chunk.sequence.tokens)
        assert len(chunk.sequence.blocks) * SIZE >= chunk.end
        if chunk.source is not None:
            assert chunk.source.tokens == chunk.sequence.tokens and chunk.reaches_the_end
            assert any(c.sequence is chunk.source and c.reaches_the_end for c in plan.prefill)
    for sequence in plan.decode:
        num_tokens = sequence.length + min(plan.num_rounds, sequence.num_left) - 1
        assert len(sequence.blocks) * SIZE >= num_tokens, "room for all that will be computed"
    used = {block for s in scheduler.running.values() for block in s.blocks}
    assert scheduler.pool.num_used == len(used), "every used block has an owner that runs"
    assert all(not s.blocks and not s.num_computed for s in scheduler.waiting)


def test_a_long_prompt_is_computed_in_pieces_while_others_decode():
    scheduler = make_scheduler(max_prefill_tokens=6)
    add(scheduler, make_sequence(0, 3), make_sequence(1, 14), make_sequence(2, 4))
    assert step(scheduler) == ({0: 3, 1: 3}, [], [])
    assert step(scheduler) == ({1: 6}, [0], [])
    assert step(scheduler) == ({1: 5, 2: 1}, [0], [])
    assert step(scheduler) == ({2: 3}, [0, 1], [])


def test_several_rounds_are_planned_when_no_prompt_waits():
    scheduler = make_scheduler(max_rounds=4)
    short, long = make_sequence(0, 3, max_tokens=3), make_sequence(1, 3, max_tokens=11)
    add(scheduler, short, long)
    step(scheduler)
    assert (len(short.logprobs), len(long.logprobs)) == (1, 1), "prompts end with one token"
    step(scheduler)
    assert (len(short.logprobs), len(long.logprobs)) == (3, 5)
    add(scheduler, make_sequence(2, 3))
    step(scheduler)
    assert len(long.logprobs) == 6, "one round beside a prompt"
    while scheduler.has_work:
        step(scheduler)
    assert len(long.logprobs) == 11 and scheduler.pool.num_used == 0


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_memory():
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, make_sequence(0, 8, max_tokens=4), make_sequence(1, 12, max_tokens=1), make_sequence(2, 1))
    assert step(scheduler)[0] == {0: 8}
    for _ in range(3):
        assert step(scheduler) == ({}, [0], [])
    assert step(scheduler)[0].keys() == {1, 2}


def test_when_memory_runs_out_the_youngest_gives_way_and_comes_back():
    scheduler = make_scheduler(num_blocks=4)
    old, young = make_sequence(0, 7, max_tokens=6), make_sequence(1, 8, max_tokens=3)
    add(scheduler, old, young)
    assert step(scheduler)[0] == {0: 7, 1: 8}
    # The young one has filled its two blocks and needs a third, but there is none that a younger one could give.
    assert step(scheduler) == ({}, [0], [1])
    assert len(old.logprobs) == 2 and len(young.logprobs) == 1, "what it has sampled is kept"
    while old.finish_reason is None:
        assert step(scheduler) == ({}, [0], [])
    assert step(scheduler)[0] == {1: 5}, "the block that the old one did not need is still known"
    while scheduler.has_work:
        step(scheduler)
    assert len(young.logprobs) == 3 and len(old.logprobs) == 6
    assert scheduler.num_preemptions == 1 and scheduler.pool.num_used == 0


def test_the_preempted_return_in_the_order_in_which_they_came():
    scheduler = make_scheduler(num_blocks=6)
    sequences = [make_sequence(n, 7, max_tokens=12) for n in range(3)]
    add(scheduler, *sequences, make_sequence(3, 4))
    preempted = []
    while scheduler.has_work:
        preempted += step(scheduler)[2]
        numbers = [s.number for s in scheduler.waiting]
        assert numbers == sorted(numbers)
    assert preempted[0] == 2 and all(len(s.logprobs) == 12 for s in sequences)


@pytest.mark.parametrize(("length", "num_blocks"), [(10, 2 + 4), (12, 3), (3, 4)])
def test_equal_prompts_of_one_step_are_computed_once_where_the_runner_copies(length, num_blocks):
    scheduler = make_scheduler(copies_prompts=True)
    members = [make_sequence(n, list(range(length)), max_tokens=5) for n in range(4)]
    add(scheduler, *members, make_sequence(4, list(range(length - 1))))
    prefilled, decoded, _ = step(scheduler)
    assert prefilled == {0: length, 1: 0, 2: 0, 3: 0} | ({4: length - 1} if length <= SIZE else {})
    assert len({block for s in members for block in s.blocks}) == num_blocks, "only the last block is each one's own"
    assert scheduler.num_prefix_tokens == 3 * length and not decoded
    assert step(scheduler)[1][:4] == [0, 1, 2, 3]


def test_a_copied_prompt_gives_way_like_any_other():
    scheduler = make_scheduler(num_blocks=4, copies_prompts=True)
    add(scheduler, make_sequence(0, 4, max_tokens=6))
    step(scheduler)
    add(scheduler, *(make_sequence(n, [1, 2, 3]) for n in (1, 2, 3)))
    assert step(scheduler) == ({1: 3, 2: 0}, [0], [3]), "the first needs the block that the youngest has just got"
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.pool.num_used == 0


def test_the_members_of_a_group_keep_their_places_while_the_first_computes():
    scheduler = make_scheduler(max_sequences=3)
    groups = [make_sequence(3 * group + n, [100 * group + i for i in range(9)]) for group in range(2) for n in range(3)]
    add(scheduler, *groups)
    assert step(scheduler)[0] == {0: 9}
    assert step(scheduler)[0] == {1: 1, 2: 1}


def test_a_group_with_a_long_prompt_waits_until_all_of_it_is_there():
    scheduler = make_scheduler(max_prefill_tokens=8)
    prompt = list(range(21))
    add(scheduler, *(make_sequence(n, prompt) for n in range(3)))
    assert [step(scheduler)[0] for _ in range(4)] == [{0: 8}, {0: 8}, {0: 5}, {1: 1, 2: 1}]
    assert scheduler.num_prefix_tokens == 2 * 20


def test_when_the_first_of_a_group_is_cancelled_the_next_computes():
    scheduler = make_scheduler(max_prefill_tokens=4)
    first, second = make_sequence(0, list(range(10))), make_sequence(1, list(range(10)))
    add(scheduler, first, second)
    assert step(scheduler)[0] == {0: 4}
    scheduler.remove(first)
    assert step(scheduler)[0] == {1: 4}
    assert scheduler.num_prefix_tokens == 4


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 10)),
        st.tuples(st.sampled_from(["step", "step", "cancel", "new version"]), st.integers(0, 9), st.just(0)),
    ),
    max_size=50,
)


@given(
    events=EVENTS,
    num_blocks=st.integers(6, 12),
    max_sequences=st.integers(1, 5),
    max_prefill_tokens=st.integers(1, 20),
    max_rounds=st.sampled_from([1, 1, 4]),
    copies_prompts=st.booleans(),
)
@settings(max_examples=100)
def test_every_sequence_gets_all_tokens_under_random_events(
    events, num_blocks, max_sequences, max_prefill_tokens, max_rounds, copies_prompts
):
    scheduler = make_scheduler(
        num_blocks,
        max_sequences=max_sequences,
        max_prefill_tokens=max_prefill_tokens,
        max_rounds=max_rounds,
        copies_prompts=copies_prompts,
    )
    sequences: list[Sequence] = []
    cancelled = set()
    for name, argument, max_tokens in events:
        if name == "add":
            sequences.append(make_sequence(len(sequences), argument, max_tokens))
            scheduler.waiting.append(sequences[-1])
        elif name == "new version":
            scheduler.new_version(scheduler.version + 1)
        elif name == "step":
            step(scheduler)
        elif sequences:
            victim = sequences[argument % len(sequences)]
            if victim.finish_reason is None:
                cancelled.add(victim.number)
                scheduler.remove(victim)
    for _ in range(4000):
        if not scheduler.has_work:
            break
        step(scheduler)
    assert not scheduler.has_work and scheduler.pool.num_used == 0
    for sequence in sequences:
        assert sequence.number in cancelled or len(sequence.logprobs) == sequence.sampling.max_tokens


@given(
    lengths=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 10)), min_size=1, max_size=12),
    num_blocks=st.integers(6, 30),
    max_prefill_tokens=st.integers(1, 40),
    stop_at=st.integers(1, 12),
    shares=st.booleans(),
)
@settings(max_examples=100)
def test_plans_launched_before_the_last_tokens_are_read_sample_the_same_tokens(
    lengths, num_blocks, max_prefill_tokens, stop_at, shares
):
    scheduler = make_scheduler(num_blocks, max_prefill_tokens=max_prefill_tokens, max_rounds=4, copies_prompts=True)
    sequences = [make_sequence(i, [5] * n if shares else n, num_new) for i, (n, num_new) in enumerate(lengths)]
    add(scheduler, *sequences)
    unread: list[tuple[Sequence, int]] = []
    for _ in range(4000):
        if not scheduler.has_work:
            break
        plan = scheduler.plan()
        if plan.needs_reading:
            read(scheduler, unread, stop_at)
            unread = []
            plan = scheduler.plan()
            assert not plan.needs_reading
        check(scheduler, plan)
        assert not any(victim.num_ahead for victim in plan.preempted)
        launched = launch(scheduler, plan)
        read(scheduler, unread, stop_at)
        unread = launched
    assert not scheduler.has_work and scheduler.pool.num_used == 0
    assert [len(s.logprobs) for s in sequences] == [min(num_new, stop_at) for _, num_new in lengths]


# --- admission that keeps room ---


def run_all(scheduler: Scheduler, sequences: list[Sequence]) -> int:
    """Steps until every sequence has all its tokens; the largest number that ran at once."""
    most = 0
    for _ in range(10_000):
        if not scheduler.has_work:
            return most
        step(scheduler)
        most = max(most, len(scheduler.running))
        for sequence in sequences:
            if len(sequence.logprobs) >= sequence.max_tokens and sequence.finish_reason is None:
                sequence.finish_reason = "length"
                scheduler.remove(sequence)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("keeps_room", [False, True])
def test_admission_that_keeps_room_preempts_less(keeps_room):
    pool = BlockPool(40, SIZE)
    scheduler = Scheduler(pool, Limits(64, 256, keeps_room=keeps_room))
    sequences = [make_sequence(number, 2 * SIZE, max_tokens=6 * SIZE) for number in range(24)]
    add(scheduler, *sequences)
    most = run_all(scheduler, sequences)
    assert all(len(sequence.logprobs) == 6 * SIZE for sequence in sequences) and pool.num_used == 0
    if keeps_room:
        assert scheduler.num_preemptions <= 16 and most >= 5, "half of max_tokens is expected until some have finished"
    else:
        assert scheduler.num_preemptions > 24


def test_a_sequence_that_is_expected_to_outgrow_the_pool_is_admitted_alone():
    scheduler = Scheduler(BlockPool(8, SIZE), Limits(64, 256, keeps_room=True))
    sequences = [make_sequence(number, SIZE, max_tokens=100 * SIZE) for number in range(2)]
    add(scheduler, *sequences)
    step(scheduler)
    assert list(scheduler.running) == [0]


def test_expected_length_follows_finished_completions():
    lengths = CompletionLengths()
    sequence = make_sequence(0, 10, max_tokens=1000)
    assert lengths.expected(sequence) == 10 + 501
    for length in [90, 110] * 8:
        lengths.add(length)
    assert lengths.expected(sequence) == 10 + 101
    sequence.length += 200
    assert lengths.expected(sequence) == 10 + 200 + 26, "it is longer than usual already"
    short = make_sequence(1, 10, max_tokens=20)
    assert lengths.expected(short) == 30
