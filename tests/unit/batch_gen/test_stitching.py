import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic import registry
from ludic.agents import Agent, ReActAgent, ToolAgent
from ludic.batch_gen import stitch_rollout
from ludic.batch_gen.stitching import MAX_INFO_TEXT
from ludic.context import SlidingWindow, TruncatedThinkingContext
from ludic.interaction import MultiAgentProtocol, SingleAgentProtocol
from ludic.types import (
    AgentStep,
    CandidateSets,
    EnvironmentStep,
    Failure,
    GroupKey,
    Rollout,
    SampleOrigin,
    TokenTrace,
    VersionRun,
)
from tests.fakes import CountingEnv, RecordingClient, ScriptedClient, make_agent
from tests.unit.batch_gen.parts import RL, SHORT, StepIndex, random_client


def call_step(
    index, prompt, completion, *, turn, logprobs=None, runs=(), temperature=1.0, drawn=(None, None), **fields
) -> AgentStep:
    trace = TokenTrace(prompt, completion, logprobs, "stop", runs, temperature, *drawn)
    return AgentStep(index=index, prompt_messages=[], action="", trace=trace, turn_id=turn, **fields)


def env_step(index, *, turn, reward=0.0, **fields) -> EnvironmentStep:
    return EnvironmentStep(
        index=index,
        prev_obs=None,
        action="",
        parsed_action="x",
        next_obs=None,
        source_agent_step_id=None,
        agent_step_ids=[],
        reward=reward,
        turn_id=turn,
        **fields,
    )


def weights_of(rollout) -> dict:
    return StepIndex().compute([rollout])


def two_turns(**second) -> Rollout:
    """Prompt 1 2, sampled 3 4; then 5 was added and 6 sampled."""
    return Rollout(
        steps=[
            call_step(0, [1, 2], [3, 4], turn="a", logprobs=[-0.25, -0.5], runs=[(7, 2)]),
            env_step(1, turn="a", reward=0.5),
            call_step(2, [1, 2, 3, 4, 5], [6], turn="b", **{"logprobs": [-1.0], "runs": [(7, 1)], **second}),
            env_step(3, turn="b", reward=1.0, terminated=True),
        ]
    )


# --- by hand ---


def test_turns_that_only_append_become_one_item():
    (item,) = stitch_rollout(rollout := two_turns(), _constant(rollout))
    assert item.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert item.action_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1]
    assert item.weight == 2.0 and item.attachments.token_weights is None
    assert item.actor_logps.tolist() == [-0.25, -0.5, -1.0]
    assert item.attachments.version_runs == (VersionRun(7, 3),) and item.oldest_version == 7
    assert item.attachments.temperature == 1.0


def _constant(rollout, value=2.0):
    return {(rollout.id, step.index): value for step in rollout.steps}


def test_turns_that_weigh_differently_give_token_weights_and_their_mean():
    (item,) = stitch_rollout(rollout := two_turns(), weights_of(rollout))
    # both tokens of the first turn weigh 1 (its env step), the one of the second weighs 3
    assert item.token_weights.tolist() == [1.0, 1.0, 3.0]
    assert item.weight == pytest.approx(5 / 3)


def test_experts_of_a_token_are_those_of_the_call_that_first_computed_it():
    """The second call knows the last token of the first completion, and would say otherwise of earlier ones."""
    first = np.array([1, 1, 1, -1]).repeat(2).reshape(4, 1, 2)
    second = np.array([2, 2, 2, 2, 2, -1]).repeat(2).reshape(6, 1, 2)
    rollout = two_turns()
    traces = [step.trace for step in rollout.steps if step.trace is not None]
    for trace, experts in zip(traces, (first, second), strict=True):
        object.__setattr__(trace, "experts", experts.astype(np.int16))
    (item,) = stitch_rollout(rollout, _constant(rollout))
    assert item.attachments.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, -1]
    object.__setattr__(traces[1], "experts", None)
    (item,) = stitch_rollout(rollout, _constant(rollout))
    assert item.attachments.experts is None, "a call without them leaves the item without"


def test_candidates_of_turns_are_put_together_and_what_cannot_be_repeated_is_said_of_the_item():
    (item,) = stitch_rollout(
        rollout := two_turns(drawn=(CandidateSets.of([[6, 8]]), "min_tokens=1")), _constant(rollout)
    )
    assert [item.attachments.candidates[i].tolist() for i in range(3)] == [[], [], [6, 8]]
    assert item.attachments.untrainable_sampling == "min_tokens=1"
    (plain,) = stitch_rollout(rollout := two_turns(), _constant(rollout))
    assert plain.attachments.candidates is None and plain.attachments.untrainable_sampling is None


def test_per_turn_gives_one_item_each():
    first, second = stitch_rollout(rollout := two_turns(), weights_of(rollout), per_turn=True)
    assert (first.input_ids.tolist(), first.weight) == ([1, 2, 3, 4], 1.0)
    assert (second.input_ids.tolist(), second.weight) == ([1, 2, 3, 4, 5, 6], 3.0)
    assert second.action_mask.astype(int).tolist() == [0, 0, 0, 0, 0, 1], "what was sampled earlier is state here"
    assert second.attachments.token_weights is None and [i.origin.segment for i in (first, second)] == [0, 1]


@pytest.mark.parametrize("prompt", [[9, 2, 3, 4, 5], [1, 2, 3, 9, 5], [1, 2, 3], []])
def test_a_rewritten_history_starts_a_new_item(prompt):
    rollout = two_turns()
    rollout.steps[2] = call_step(2, prompt, [6], turn="b", logprobs=[-1.0], runs=[(7, 1)])
    first, second = stitch_rollout(rollout, weights_of(rollout))
    assert first.input_ids.tolist() == [1, 2, 3, 4] and second.input_ids.tolist() == [*prompt, 6]
    assert second.action_mask.tolist() == [False] * len(prompt) + [True]
    assert [i.origin.reward for i in (first, second)] == [0.5, 1.0]


def test_calls_of_a_tool_loop_weigh_what_their_turn_does():
    rollout = Rollout(
        steps=[
            call_step(0, [1], [2], turn="a", action_target="internal"),
            call_step(1, [1, 2, 3], [4], turn="a", reward=0.0),
            env_step(2, turn="a", reward=1.0),
        ]
    )
    (item,) = stitch_rollout(rollout, {(rollout.id, 0): 8.0, (rollout.id, 1): 9.0, (rollout.id, 2): 5.0})
    assert item.weight == 5.0 and item.attachments.token_weights is None
    assert item.origin.num_turns == 1 and item.origin.reward == 1.0 and item.actor_logps is None


def test_a_turn_that_never_reached_the_env_weighs_what_its_last_call_does():
    failed = {"parse_error": True}
    rollout = Rollout(steps=[call_step(0, [1], [2], turn="a", reward=-0.5, info=failed)])
    (item,) = stitch_rollout(rollout, {(rollout.id, 0): -3.0})
    assert item.weight == -3.0 and item.origin.parse_error and item.origin.reward == -0.5
    assert item.origin.step_kind == "agent"


def test_failed_rollouts_and_empty_completions_give_no_items():
    failed = two_turns()
    failed.failure = Failure(error="X", message="")
    assert stitch_rollout(failed, weights_of(failed)) == []
    silent = Rollout(steps=[call_step(0, [1], [], turn="a"), env_step(1, turn="a")])
    assert stitch_rollout(silent, weights_of(silent)) == []


def test_env_steps_that_hold_their_own_tokens_give_items():
    rollout = Rollout(
        steps=[
            env_step(0, turn="a", reward=0.5, trace=TokenTrace([1, 2], [3, 4], [-0.25, -0.5])),
            env_step(1, turn="b", reward=1.0, trace=TokenTrace([1, 2, 3, 4, 5], [6], [-1.0])),
        ]
    )
    (item,) = stitch_rollout(rollout, weights_of(rollout))
    assert item.input_ids.tolist() == [1, 2, 3, 4, 5, 6] and item.action_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert item.token_weights.tolist() == [0, 0, 1] and item.attachments.token_rewards.tolist() == [0, 0.5, 1]
    assert item.origin.total_reward == 1.5 and item.origin.num_turns == 2


def test_the_reward_of_a_turn_is_counted_where_it_ends():
    rollout = Rollout(
        steps=[
            call_step(0, [1], [2], turn="a", action_target="internal"),
            call_step(1, [9], [4], turn="a"),
            env_step(2, turn="a", reward=1.0),
        ]
    )
    items = stitch_rollout(rollout, weights_of(rollout))
    assert [item.origin.reward for item in items] == [0.0, 1.0]
    assert [item.weight for item in items] == [2.0, 2.0]


def test_missing_logprobs_are_an_error_only_when_they_were_asked_for():
    rollout = two_turns(logprobs=None)
    with pytest.raises(ValueError, match=r"steps \[2\]"):
        stitch_rollout(rollout, weights_of(rollout), require_logprobs=True)
    complete = two_turns()
    assert len(stitch_rollout(complete, weights_of(complete), require_logprobs=True)) == 1


def test_missing_and_infinite_weights_name_the_step():
    rollout = two_turns()
    with pytest.raises(KeyError, match=f"no weight to step 1 of rollout {rollout.id}"):
        stitch_rollout(rollout, {})
    with pytest.raises(ValueError, match="step 1.*weight nan"):
        stitch_rollout(rollout, _constant(rollout, float("nan")))


def test_the_origin_holds_ludics_facts_and_meta_small_ones_of_the_env_that_cannot_replace_them():
    rollout = two_turns()
    rollout.meta = {"agent_id": "me", "model": "m", "request_meta": {"group_id": "g", "topic": "t", "domain": "d"}}
    rollout.meta |= {"env_seed": 5, "sampling_seed": 6}
    rollout.steps[3].info = {
        "reward": 99.0, "truncated": True, "correct": True, "level": 3, "word": "w",
        "board": [1, 2], "messages": [{"role": "user"}], "final_obs": "x" * (MAX_INFO_TEXT + 1),
    }  # fmt: skip
    (item,) = stitch_rollout(rollout, weights_of(rollout))
    env = {"reward": 99.0, "truncated": True, "correct": True, "level": 3, "word": "w"}
    assert item.meta == {**env, "request_meta": {"group_id": "g", "topic": "t", "domain": "d"}}
    assert item.origin == SampleOrigin(
        rollout_id=rollout.id, episode=rollout.id, group_id="g", agent_id="me", policy="m", delegate=None, env_name=None, domain="d", objective=None,
        env_seed=5, sampling_seed=6, segment=0, step_index=3, step_kind="env", num_turns=2, reward=1.5, total_reward=1.5,
        reward_components={"env": 1.5},
        truncated=False, terminated=True, stop=None, finish_reason="stop", num_parse_errors=0, num_cut_off=0,
    )  # fmt: skip
    assert item.origin.group == GroupKey("g", "me", None) == rollout.group
    assert item.origin.parse_error is False and item.origin.episode_truncated is False
    record = item.record()
    assert (record["reward"], record["truncated"], record["correct"], record["parse_error"]) == (
        1.5,
        False,
        True,
        False,
    )
    assert (record["completion_length"], record["prompt_length"]) == (3, 3)


# --- the property: bit for bit what the server saw and sampled ---


def check_items(calls, items) -> None:
    """`calls` are (prompt, completion) in order. Each lies in exactly one item, as it was; nothing else is an action."""
    calls = [call for call in calls if call[1]]
    position = 0
    for item in items:
        ids, mask = item.input_ids.tolist(), item.action_mask.copy()
        while mask.any():
            prompt, completion = calls[position]
            end = len(prompt) + len(completion)
            assert ids[:end] == [*prompt, *completion]
            assert mask[len(prompt) : end].all() and not mask[: len(prompt)].any()
            mask[:end] = False
            position += 1
        assert end == len(ids), "an item ends with what was sampled last"
    assert position == len(calls), "every call is in an item"


tokens = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def traces(draw):
    """Calls that mostly extend the one before, and sometimes rewrite it (a little, or all of it)."""
    calls, sequence = [], []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["extend", "extend", "extend", "cut", "flip", "fresh"]))
        prompt = [*sequence, *draw(tokens)] if kind != "fresh" else draw(tokens)
        if kind == "cut":
            prompt = prompt[: draw(st.integers(0, len(prompt)))]
        if kind == "flip" and prompt:
            prompt[draw(st.integers(0, len(prompt) - 1))] ^= 1
        completion = draw(tokens)
        calls.append((prompt, completion, draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])), draw(st.booleans())))
        sequence = [*prompt, *completion]
    return calls


@given(traces(), st.booleans())
@settings(max_examples=300)
def test_items_are_what_was_seen_and_sampled_for_any_history(calls, per_turn):
    steps, turn = [], 0
    for prompt, completion, temperature, ends_turn in calls:
        logprobs = [-float(len(steps)) - i / 8 for i in range(len(completion))]
        steps.append(
            call_step(len(steps), prompt, completion, turn=str(turn), temperature=temperature, logprobs=logprobs)
        )
        turn += ends_turn
    rollout = Rollout(steps=steps)
    items = stitch_rollout(rollout, weights_of(rollout), per_turn=per_turn)
    check_items([(prompt, completion) for prompt, completion, *_ in calls], items)
    sampled = [x for step in steps for x in step.trace.completion_logprobs.tolist()]
    assert [x for item in items for x in item.actor_logps.tolist()] == sampled
    last_of = {step.turn_id: step.index for step in steps}
    expected = [float(last_of[step.turn_id]) for step in steps for _ in step.trace.completion_token_ids]
    assert [x for item in items for x in item.token_weights.tolist()] == expected
    for before, after in pairwise(items):
        end, start = len(before.input_ids), int(after.action_mask.argmax())
        continues = start >= end and np.array_equal(after.input_ids[:end], before.input_ids)
        same_kind = before.attachments.temperature == after.attachments.temperature
        assert per_turn or not (continues and same_kind), "items are as long as they can be"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tool_call(**arguments) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


async def play(client, *, cls=ReActAgent, max_steps=4, inference=None, **kwargs):
    recorded = RecordingClient(client)
    kwargs = {"tools": [add], **kwargs} if cls in (ReActAgent, ToolAgent) else kwargs
    protocol = SingleAgentProtocol(make_agent(recorded, cls=cls, **kwargs))
    (rollout,) = await protocol.run(
        env=CountingEnv(3), max_steps=max_steps, env_seed=1, sampling_seed=2, inference=inference or SHORT
    )
    return rollout, recorded.calls


@pytest.mark.parametrize("cls", [ToolAgent, ReActAgent])
async def test_a_tool_using_episode_over_several_turns_is_one_item(cls):
    replies = [
        tool_call(a=1, b=2),
        "<a>inc</a>",
        "no tag",
        "<a>inc</a>",
        tool_call(a=1),
        tool_call(a=3, b=3),
        "<a>inc</a>",
    ]
    rollout, calls = await play(ScriptedClient(replies), cls=cls, max_steps=9, inference=RL)
    items = stitch_rollout(rollout, weights_of(rollout), require_logprobs=True)
    assert len(calls) == 7 and len(items) == 1
    check_items(calls, items)
    assert items[0].origin.num_turns == 4 and items[0].origin.num_parse_errors == 1
    assert items[0].origin.reward == pytest.approx(rollout.total_reward)
    assert items[0].origin.terminated and len(set(items[0].token_weights.tolist())) == 4


@pytest.mark.parametrize("seed", range(5))
async def test_random_tokens_that_no_tokenizer_would_write_survive(seed):
    client = random_client()
    client.table_VV = np.random.default_rng(seed).normal(size=client.table_VV.shape)
    rollout, calls = await play(client, max_steps=4)
    items = stitch_rollout(rollout, weights_of(rollout), require_logprobs=True)
    check_items(calls, items)
    assert len(items) == 1 and items[0].oldest_version == 3 and items[0].attachments.temperature == 1.0
    first = calls[0]
    expected = client.logprobs(first[0][-1], 1.0)[first[1][0]]
    assert items[0].actor_logps[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ctx", [SlidingWindow(max_turns=1), TruncatedThinkingContext()], ids=["window", "thinking"])
async def test_a_context_that_rewrites_history_gives_several_exact_items(ctx):
    replies = [f"<think>{n}</think><a>inc</a>" for n in ["one", "two", "three"]]
    rollout, calls = await play(ScriptedClient(replies), cls=Agent, ctx=ctx, inference=RL)
    items = stitch_rollout(rollout, weights_of(rollout))
    assert len(items) > 1
    check_items(calls, items)
    assert sum(item.origin.reward for item in items) == pytest.approx(rollout.total_reward)


async def test_every_player_of_a_game_gets_its_own_items():
    clients = {player: RecordingClient(ScriptedClient(lambda request: "<a>C</a>")) for player in ("a", "b")}
    env = registry.envs.make("prisoners_dilemma", rounds=2)
    agents = {agent_id: make_agent(client) for agent_id, client in zip(env.agent_ids, clients.values(), strict=True)}
    rollouts = await MultiAgentProtocol(agents).run(env=env, max_steps=5, sampling_seed=1, inference=RL)
    assert len(rollouts) == 2
    for rollout, client in zip(rollouts, clients.values(), strict=True):
        items = stitch_rollout(rollout, weights_of(rollout))
        check_items(client.calls, items)
        assert {item.origin.agent_id for item in items} == {rollout.meta["agent_id"]}


def test_versions_are_run_lengths_with_equal_neighbours_merged():
    rollout = Rollout(
        steps=[
            call_step(0, [1], [2, 3], turn="a", runs=[(4, 1), (5, 1)]),
            call_step(1, [1, 2, 3], [6, 7], turn="b", runs=[(5, 1), (6, 1)]),
        ]
    )
    (item,) = stitch_rollout(rollout, weights_of(rollout))
    assert item.attachments.version_runs == ((4, 1), (5, 2), (6, 1)) and item.oldest_version == 4


@pytest.mark.parametrize(
    "second",
    [{"temperature": 0.5}, {"logprobs": None}, {"runs": ()}],
    ids=["another temperature", "without logprobs", "without versions"],
)
def test_calls_that_differ_in_kind_are_not_put_together(second):
    items = stitch_rollout(rollout := two_turns(**second), weights_of(rollout))
    assert [item.input_ids.tolist() for item in items] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
