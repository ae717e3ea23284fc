"""One stream of games; each trainer gets the rollouts of its policy."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from ludic.agents import Agent
from ludic.batch_gen import AssignedRequests, RolloutEngine, SharedRollouts, make_dataset_sequence_requests_fn
from ludic.envs.tic_tac_toe.board import CELLS
from ludic.inference import ByteTemplate
from ludic.interaction import Policies
from ludic.parsers import ParseResult
from ludic.training import GroupNormalizedReturn, MonteCarloReturn, RoleBaselineReturn
from ludic.types import (
    ChatResponse,
    ConfigError,
    InferenceSpec,
    Info,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
)
from tests.fakes import RandomTokenClient, RecordingClient, make_agent

pytestmark = pytest.mark.slow

SEATINGS = [{"X": "ann", "O": "bob"}, {"X": "bob", "O": "ann"}, {"X": "ann", "O": "old"}]
INFERENCE = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=4), return_=ReturnSpec.for_rl())
GROUP = 3


class FailingClient:
    """Fails when it is told to."""

    def __init__(self, inner, is_broken: Callable[[TokenCompletionRequest], bool]) -> None:
        self.inner, self.is_broken = inner, is_broken

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        if self.is_broken(request):
            raise RuntimeError("broken")
        return await self.inner.complete_tokens(request)

    def sync_weights(self, params, *, timeout_s=600.0, version=None) -> str:
        raise RuntimeError("no weights")


def sampler(seed: int) -> RandomTokenClient:
    template = ByteTemplate()
    return RandomTokenClient(vocab_size=264, end_ids=(ByteTemplate.END,), decode=template.decode_reply, table_seed=seed)


def some_cell(text: str) -> ParseResult:
    """Any reply is a move, legal or not."""
    return ParseResult(CELLS[sum(map(ord, text)) % 9], 0.0, None)


def player(client, name: str) -> Agent:
    return make_agent(client, model=name, parser=some_cell, reject_incomplete_completions=False)


class Stream:
    """Three policies, of which two are trained."""

    def __init__(self, seatings=SEATINGS, batch_size: int = 6, **clients) -> None:
        self.clients = {
            name: RecordingClient(clients.get(name, sampler(i))) for i, name in enumerate(("ann", "bob", "old"))
        }
        policies = Policies(self.clients, player)
        requests_fn = make_dataset_sequence_requests_fn(
            range(1000),
            batch_size=batch_size,
            group_size=GROUP,
            env_kind="tic_tac_toe_duel",
            env_kwargs_fn=lambda _: {},
            protocol_kind="duel",
            inference=INFERENCE,
        )
        self.shared = SharedRollouts(
            RolloutEngine(protocol_registry={"duel": policies.protocol}, max_retries=0, max_failed_share=1.0),
            requests_fn=AssignedRequests(requests_fn, seatings, policies),
            max_steps=3,
        )

    def source(self, policy: str, **settings):
        return self.shared.batches_for(policy, **{"credit_assigner": MonteCarloReturn(), **settings})


def tokens(batch) -> list:
    return [(item.input_ids.tolist(), item.action_mask.tolist(), item.weight) for item in batch.items]


async def take(*sources) -> list:
    return [await source.next_batch() for source in sources]


def test_each_trainer_gets_only_the_rollouts_of_its_policy():
    stream = Stream()
    batches = asyncio.run(take(stream.source("ann"), stream.source("bob")))
    for name, batch in zip(("ann", "bob"), batches, strict=True):
        assert {item.origin.policy for item in batch.items} == {name}
        trained = sorted(tuple(item.input_ids[item.action_mask].tolist()) for item in batch.items)
        sampled = [tokens for _, tokens in stream.clients[name].calls]
        # Every sampled token is trained on once: an item holds the replies of one game.
        assert sum(map(len, trained)) == sum(map(len, sampled))
        assert sorted(t for reply in trained for t in reply) == sorted(t for reply in sampled for t in reply)
    assert stream.clients["old"].calls, "the frozen one played"


def test_the_parts_of_one_round_are_played_once():
    stream = Stream()
    ann, bob = asyncio.run(take(stream.source("ann"), stream.source("bob")))
    games = {item.meta["request_meta"]["sample_index"] for item in (*ann.items, *bob.items)}
    assert len(games) <= 6 and ann.meta["round"] == bob.meta["round"] == 0


def test_siblings_are_compared_within_group_seat_and_policy():
    stream = Stream()
    credit = GroupNormalizedReturn(GROUP)
    for batch in asyncio.run(
        take(stream.source("ann", credit_assigner=credit), stream.source("bob", credit_assigner=credit))
    ):
        groups: dict = {}
        for item in batch.items:
            key = item.origin.group_id, item.origin.agent_id
            groups.setdefault(key, []).append((item.origin.total_reward, item.weight))
        for members in groups.values():
            mean = np.mean([reward for reward, _ in members])
            assert len(members) == GROUP
            assert [weight for _, weight in members] == pytest.approx([reward - mean for reward, _ in members])


def test_a_policy_in_both_seats_is_trained_on_both():
    stream = Stream(seatings=[{"X": "ann", "O": "ann"}])
    (batch,) = asyncio.run(take(stream.source("ann")))
    assert {item.origin.agent_id for item in batch.items} == {"X", "O"}


def test_a_failure_of_one_policy_drops_the_group_for_all():
    calls = []

    def is_broken(request) -> bool:
        calls.append(request)
        return len(calls) == 1

    stream = Stream(seatings=SEATINGS[:1], bob=FailingClient(sampler(1), is_broken))
    ann, bob = asyncio.run(take(stream.source("ann"), stream.source("bob")))
    broken = {item.origin.group_id for item in ann.items}
    assert len(broken) == 5 and {item.origin.group_id for item in bob.items} <= broken
    assert ann.meta["num_groups_dropped"] == bob.meta["num_groups_dropped"] == 1


def test_who_needs_more_rounds_leaves_the_newest_to_the_others():
    async def scenario():
        stream = Stream()
        ann, bob = stream.source("ann"), stream.source("bob")
        rounds = [(await ann.next_batch()).meta["round"] for _ in range(3)]
        late = await bob.next_batch()
        return rounds, late.meta["round"], late.meta["num_rounds_skipped"], (await bob.next_batch()).meta["round"]

    assert asyncio.run(scenario()) == ([0, 1, 2], 2, 2, 3)


# --- resume ---


def test_a_resumed_stream_deals_what_it_would_have_dealt():
    async def scenario():
        one = Stream()
        sources = [one.source("ann"), one.source("bob")]
        await take(*sources)
        states = [source.state_dict() for source in sources]
        expected = await take(*sources)
        two = Stream()
        resumed = [two.source("ann"), two.source("bob")]
        for source, state in zip(resumed, states, strict=True):
            source.load_state_dict(state)
        return expected, await take(*resumed)

    expected, found = asyncio.run(scenario())
    assert [tokens(batch) for batch in found] == [tokens(batch) for batch in expected]
    assert [batch.meta["round"] for batch in found] == [1, 1]


def test_a_waiting_round_runs_again_for_policies_that_had_not_trained_on_it():
    async def scenario():
        one = Stream()
        ann, bob = one.source("ann"), one.source("bob")
        await take(ann, bob)
        await take(ann)  # bob has not asked for it
        states = ann.state_dict(), bob.state_dict()
        expected = [await bob.next_batch(), await ann.next_batch()]
        two = Stream()
        again = two.source("ann"), two.source("bob")
        for source, state in zip(again, states, strict=True):
            source.load_state_dict(state)
        return expected, [await again[1].next_batch(), await again[0].next_batch()]

    expected, found = asyncio.run(scenario())
    assert [batch.meta["round"] for batch in found] == [1, 2]
    assert [tokens(batch) for batch in found] == [tokens(batch) for batch in expected]


def test_a_policy_that_was_several_rounds_ahead_waits_until_the_stream_has_caught_up():
    """Bob had nothing to train on twice, after ann was saved: ann goes on with round 1, bob with 4, and ann finds that one."""

    async def scenario():
        one = Stream()
        ann, bob = one.source("ann"), one.source("bob")
        await take(ann, bob)
        saved = [ann.state_dict()]
        for _ in range(3):
            await bob.next_batch()
        saved.append(bob.state_dict())
        two = Stream()
        again = two.source("ann"), two.source("bob")
        for source, state in zip(again, saved, strict=True):
            source.load_state_dict(state)
        return [batch.meta for batch in await take(*again, again[0])]

    found = asyncio.run(scenario())
    assert [meta["round"] for meta in found] == [1, 4, 4]
    assert [meta["num_rounds_skipped"] for meta in found] == [0, 0, 2]


def test_an_interrupted_round_resets_the_position():
    async def scenario():
        stream = Stream()
        ann = stream.source("ann")
        before = ann.state_dict()
        playing = asyncio.create_task(ann.next_batch())
        await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        after = ann.state_dict()
        batch = await ann.next_batch()
        fresh = Stream()
        return before, after, batch, await fresh.source("ann").next_batch()

    before, after, batch, expected = asyncio.run(scenario())
    assert before == after
    assert tokens(batch) == tokens(expected)


def test_what_a_credit_rule_has_counted_comes_back():
    async def scenario():
        stream = Stream()
        source = stream.source("ann", credit_assigner=RoleBaselineReturn())
        await source.next_batch()
        state, expected = source.state_dict(), await source.next_batch()
        other = Stream().source("ann", credit_assigner=RoleBaselineReturn())
        other.load_state_dict(state)
        return expected, await other.next_batch()

    expected, found = asyncio.run(scenario())
    assert tokens(found) == tokens(expected)


# --- mistakes ---


def test_two_trainers_that_ask_at_the_same_time_are_refused():
    async def scenario():
        stream = Stream()
        await asyncio.gather(stream.source("ann").next_batch(), stream.source("bob").next_batch())

    with pytest.raises(ConfigError, match="take turns"):
        asyncio.run(scenario())


class Follower:
    """Hears of versions."""

    def notify_version(self, version: int) -> None:
        pass


def test_a_resume_with_other_followers_is_refused():
    state = Stream().source("ann").state_dict()
    with pytest.raises(ConfigError, match=r"'ann' has 0 followers \(leagues\), batches_for was given 1"):
        Stream().source("ann", followers=[Follower()]).load_state_dict(state)
