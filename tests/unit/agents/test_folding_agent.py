"""Folding: its triggers, the prompt afterwards, and that every sampled token is trained exactly once."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from ludic.agents import FoldingAgent, FoldingReActAgent
from ludic.agents.folding_agent import without_thinking
from ludic.batch_gen import stitch_rollout
from ludic.context import SummarisedDialog
from ludic.inference import ByteTemplate, HermesToolParser, HFChatTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.training.credit_assignment import (
    GAE,
    EpisodicReturn,
    GroupNormalizedReturn,
    LeaveOneOutReturn,
    MonteCarloReturn,
    StateGroupReturn,
    TurnGroupReturn,
    TurnLeaveOneOutReturn,
)
from ludic.types import InferenceSpec, ReturnSpec, Rollout, SamplingParams
from tests.chat_templates import make_tokenizer
from tests.fakes import CountingEnv, RecordingClient, ScriptedClient, make_agent

RL = InferenceSpec(return_=ReturnSpec.for_rl())


def folding(replies, *, max_turns=2, cls=FoldingAgent, **kwargs):
    return make_agent(replies, cls=cls, ctx=SummarisedDialog(max_turns=max_turns), **kwargs)


async def play(agent, *, target=3, max_steps=8, inference=RL, seed=1, **protocol) -> Rollout:
    (rollout,) = await SingleAgentProtocol(agent, **protocol).run(
        env=CountingEnv(target), max_steps=max_steps, env_seed=seed, sampling_seed=seed, inference=inference
    )
    return rollout


def folds(rollout) -> list:
    return [step for step in rollout.agent_steps if step.info.get("summary")]


# --- when, and what is shown then ---


async def test_a_summary_is_a_step_of_its_turn_without_reward():
    rollout = await play(folding(["<a>inc</a>", "<a>inc</a>", "two so far", "<a>inc</a>"]))
    assert [step.kind for step in rollout.steps] == ["agent", "env", "agent", "env", "agent", "agent", "env"]
    fold, action = rollout.steps[4], rollout.steps[5]
    assert fold.action_target == "internal" and fold.reward == 0 and fold.action == "two so far"
    assert fold.turn_id == action.turn_id == rollout.steps[6].turn_id and action.parent_id == fold.id
    system, shown = action.prompt_messages
    assert shown["content"] == "What you wrote down before:\ntwo so far\n\ncount=2" and system["content"] == "Say inc."
    assert rollout.stop == "terminated" and rollout.total_reward == pytest.approx(1.3)


async def test_agent_folds_when_the_next_prompt_exceeds_fold_at_tokens():
    """Counted exactly: with a limit of the longest prompt of a plain agent it never folds, with one less it does."""
    replies = ["<a>inc</a>"] * 3
    plain = await play(make_agent(replies))
    longest = max(len(step.trace.prompt_token_ids) for step in plain.agent_steps)
    assert not folds(await play(folding(replies, max_turns=None, fold_at_tokens=longest)))
    tight = await play(folding([*replies[:2], "so far two", *replies], max_turns=None, fold_at_tokens=longest - 1))
    assert [step.index for step in folds(tight)] == [4]


@pytest.mark.parametrize(
    ("reply", "written"),
    [
        ("<think>what matters?</think>\n\nthe key", "the key"),
        ("<think>what matters? I was cut o", ""),
        ("thought in the prompt</think> the key", "the key"),
        ("<think>a</think><think>b</think> the key <think>c", "the key"),
        ("plain", "plain"),
        ("  ", ""),
    ],
)
def test_thinking_is_removed_from_a_summary(reply, written):
    assert without_thinking(reply) == written


async def test_a_cut_off_summary_is_used():
    client = RecordingClient(ScriptedClient(["<a>inc</a>", "the door is east", "<a>inc</a>"]))
    rollout = await play(folding(client, max_turns=1, max_summary_tokens=8), target=2)
    (fold,) = folds(rollout)
    assert fold.info["finish_reason"] == "length" and not fold.info["summary_empty"]
    assert [request.sampling.max_tokens for request in client.requests] == [256, 8, 256]
    assert rollout.agent_steps[2].prompt_messages[-1]["content"].startswith("What you wrote down before:\nthe door\n\n")


async def test_summaries_count_towards_the_token_budget():
    replies = ["<a>inc</a>", "so far one", "<a>inc</a>"]  # 11 tokens each, ends included
    rollout = await play(folding(replies, max_turns=1), target=2, max_tokens=22)
    assert rollout.stop == "token_budget" and len(folds(rollout)) == 1
    items = stitch_rollout(rollout, EpisodicReturn().compute([rollout]))
    assert sum(item.num_action_tokens for item in items) == 22, "the summary is trained though no action followed"


async def test_folding_inside_a_tool_loop_keeps_the_call_count():
    call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call>"

    def look() -> str:
        """Look around."""
        return "x" * 400

    replies = [call, call, "twice I saw x", "<a>inc</a>"]
    agent = folding(
        replies, cls=FoldingReActAgent, max_turns=None, fold_at_tokens=1000, tools=[look], max_react_steps=3
    )
    rollout = await play(agent, target=1)
    assert [step.action for step in rollout.agent_steps] == replies
    assert len({step.turn_id for step in rollout.steps}) == 1
    last = rollout.agent_steps[-1].prompt_messages[-1]["content"]
    assert last.startswith("What you wrote down before:\ntwice I saw x\n\ncount=0\n\nYou have no tool calls left.")


# --- every sampled token is trained exactly once ---


class TaggingClient:
    """Gives every sampled token a unique log-prob, and records the tokens before it."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.sampled: dict[float, tuple[list[int], int]] = {}
        """Tag → (everything before the token, the token)."""

    async def complete_tokens(self, request):
        response, info = await self._inner.complete_tokens(request)
        ids = np.asarray(response.completion_token_ids).tolist()
        tags = [-float(len(self.sampled) + n) for n in range(len(ids))]
        prompt = request.prompt_token_ids.tolist()
        self.sampled |= {tag: ([*prompt, *ids[:n]], ids[n]) for n, tag in enumerate(tags)}
        return replace(response, completion_logprobs=np.array(tags, dtype=np.float32)), info

    def sync_weights(self, params, *, timeout_s=600.0, version=None):
        raise RuntimeError("not served")


REPLIES = (
    "<a>inc</a>", "<a>inc</a>", "<a>dec</a>", "cannot be read", "", "<think>so</think><a>inc</a>", "<think>never closed",
    "naïve 你好 🎲", "<tool_call>broken</tool_call>", *['<tool_call>{"name": "look", "arguments": {}}</tool_call>'] * 4,
)  # fmt: skip


def look() -> str:
    """Look around."""
    return "nothing new"


def template_and_client(style, script):
    if style == "bytes":
        return ByteTemplate(tool_parser=HermesToolParser()), TaggingClient(ScriptedClient(script))
    tokenizer = make_tokenizer(style)
    return HFChatTemplate(tokenizer, tool_parser=HermesToolParser()), TaggingClient(
        ScriptedClient(script, tokenizer=tokenizer)
    )


async def random_episode(seed: int) -> tuple[Rollout, TaggingClient]:
    """Any agent, template, trigger and limit; replies that can and cannot be read, call tools, think, or say nothing."""
    rng = random.Random(seed)

    def script(request):
        return random.Random(f"{seed} {request.seed}").choice(REPLIES)

    template, client = template_and_client(rng.choice(["bytes", "qwen", "llama3", "mistral"]), script)
    cls = rng.choice([FoldingAgent, FoldingReActAgent])
    agent = folding(
        client,
        cls=cls,
        max_turns=rng.choice([None, 1, 2, 4]),
        fold_at_tokens=rng.randint(1, 400),
        chat_template=template,
        max_prompt_tokens=rng.choice([None, None, 900]),
        **({"tools": [look], "max_react_steps": 3} if cls is FoldingReActAgent else {}),
    )
    inference = replace(RL, sampling=SamplingParams(max_tokens=rng.choice([3, 12, 64])))
    rollout = await play(
        agent, inference=inference, seed=seed, max_tokens=rng.choice([None, None, None, 40]), max_steps=6
    )
    return rollout, client


async def test_every_sampled_token_is_trained_exactly_once():
    num_folds = num_folds_within_turns = num_unread = 0
    stops = set()
    for seed in range(100):
        rollout, client = await random_episode(seed)
        weights = EpisodicReturn().compute([rollout])
        for per_turn in (False, True):
            items = stitch_rollout(rollout, weights, per_turn=per_turn, require_logprobs=True)
            check_each_token_once(items, client)
            earned = sum(float(item.attachments.token_rewards.sum()) for item in items)
            assert earned == pytest.approx(rollout.total_reward, abs=1e-5)
        num_folds += len(folds(rollout))
        num_folds_within_turns += sum(step.parent_id is not None for step in folds(rollout))
        num_unread += sum(bool(step.info.get("parse_error")) for step in rollout.agent_steps)
        stops.add(str(rollout.stop))
    assert num_folds > 200 and num_folds_within_turns > 20 and num_unread > 100
    assert stops >= {"terminated", "max_steps", "token_budget"}


def check_each_token_once(items, client: TaggingClient) -> None:
    trained = [tag for item in items for tag in item.actor_logps.tolist()]
    assert sorted(trained) == sorted(client.sampled)
    for item in items:
        for position, tag in zip(np.flatnonzero(item.action_mask), item.actor_logps.tolist(), strict=True):
            before, token = client.sampled[tag]
            assert item.input_ids[:position].tolist() == before and item.input_ids[position] == token


# --- credit ---


async def both_ways(replies, summaries):
    """The same three turns with and without folding."""
    plain = await play(make_agent(list(replies)), max_steps=3)
    script = [*replies[:1], summaries[0], *replies[1:2], summaries[1], *replies[2:]]
    folded = await play(folding(script, max_turns=1), max_steps=3)
    for rollout in (plain, folded):
        rollout.meta["request_meta"] = {"group_id": "g"}
    assert len(folds(folded)) == 2 and len(plain.env_steps) == len(folded.env_steps)
    return plain, folded


def by_turn(rollout, weights) -> list[float]:
    return [weights[rollout.id, step.index] for step in rollout.env_steps]


RULES = {
    "monte carlo": MonteCarloReturn(gamma=0.5),
    "episodic": EpisodicReturn(),
    "group": GroupNormalizedReturn(2, normalize_adv=True),
    "leave one out": LeaveOneOutReturn(2),
    "turn group": TurnGroupReturn(2, gamma=0.5),
    "turn leave one out": TurnLeaveOneOutReturn(2, gamma=0.5),
    "state group": StateGroupReturn(2, gamma=0.5),
    "gae": GAE(0.5, 0.9, lambda rollout: [0.1, 0.2, 0.4, 0.8][: 4 if rollout.stop.is_truncation else 3]),
}


@pytest.mark.parametrize("rule", RULES)
async def test_folding_does_not_change_any_credit_rule(rule):
    good, folded_good = await both_ways(["<a>inc</a>"] * 3, ["one", "two"])
    bad, folded_bad = await both_ways(["<a>dec</a>", "<a>inc</a>", "<a>dec</a>"], ["none", "one"])
    plain, folded = [good, bad], [folded_good, folded_bad]
    expected, found = RULES[rule].compute(plain), RULES[rule].compute(folded)
    for before, after in zip(plain, folded, strict=True):
        assert by_turn(after, found) == pytest.approx(by_turn(before, expected))
        for step in folds(after):
            own = next(s for s in after.env_steps if s.turn_id == step.turn_id)
            assert found[after.id, step.index] == found[after.id, own.index]


async def test_summary_tokens_carry_the_advantage_of_their_episode():
    """Totals 1.3 and 0.2: advantages ±0.55, on every token of every segment."""
    _, good = await both_ways(["<a>inc</a>"] * 3, ["one", "two"])
    _, bad = await both_ways(["<a>dec</a>", "<a>inc</a>", "nothing to read"], ["none", "one"])
    weights = GroupNormalizedReturn(2).compute([good, bad])
    advantage = (good.total_reward - bad.total_reward) / 2
    for rollout, expected in ((good, advantage), (bad, -advantage)):
        items = stitch_rollout(rollout, weights)
        assert len(items) == 3, "each fold begins a new segment"
        for item in items:
            assert item.token_weights.tolist() == pytest.approx([expected] * item.num_action_tokens)


async def test_discounting_counts_turns_and_a_summary_has_its_turns_return():
    """Three turns, 0.1 for the format of each and 1 at the end; γ = 0.5: G = 0.1 + 0.5·(0.1 + 0.5·1.1) = 0.425, 0.65, 1.1."""
    _, rollout = await both_ways(["<a>inc</a>"] * 3, ["one", "two"])
    first, second, third = stitch_rollout(rollout, MonteCarloReturn(gamma=0.5).compute([rollout]))
    assert first.token_weights.tolist() == pytest.approx([0.425] * 11 + [0.65] * 4)  # reply, then "one" with its end
    assert second.token_weights.tolist() == pytest.approx([0.65] * 11 + [1.1] * 4)
    assert third.token_weights.tolist() == pytest.approx([1.1] * 11)
