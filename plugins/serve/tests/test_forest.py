"""Where requests continue: kinds of calls, exact tokens, threads."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.batch_gen.stitching import stitch_rollouts
from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser
from ludic.types import AgentStep, ConfigError, StopReason
from ludic_serve.gateway.forest import Node
from ludic_serve.gateway.session import Session
from ludic_serve.gateway.threads import session_rollouts
from ludic_serve.gateway.wire.canonical import ClientMessage, Reply
from plugins.serve.tests.sessions import TOOLS, ask, assistant, called, make_session, system, tool, user
from tests.unit.inference.test_real_templates import template_of

pytestmark = pytest.mark.slow


def kinds(session: Session) -> list[str]:
    return [node.kind for node in session.nodes]


def extends_parent(node: Node) -> bool:
    """Whether the prompt begins with the parent's prompt and completion."""
    assert node.parent is not None and node.parent.trace is not None and node.trace is not None
    before = node.parent.trace
    whole = np.concatenate([before.prompt_token_ids, before.completion_token_ids])
    return np.array_equal(node.trace.prompt_token_ids[: len(whole)], whole)


def trained_tokens(session: Session) -> list[list[int]]:
    """The action tokens of every item, call by call in no order."""
    rollouts = session_rollouts(session, reward=1.0)
    weights = {(rollout.id, step.index): 1.0 for rollout in rollouts for step in rollout.steps}
    items = stitch_rollouts(rollouts, weights, per_turn=True)
    return sorted(item.input_ids[item.action_mask].tolist() for item in items)


def recorded_tokens(session: Session) -> list[list[int]]:
    return sorted(n.trace.completion_token_ids.tolist() for n in session.nodes if n.is_recorded and n.trace is not None)


# --- one rule at a time ---


async def test_a_repeated_history_is_continued_on_its_exact_tokens():
    session = make_session(["one", "two", "three"])
    first = await ask(session, system("Be brief."), user("a"))
    second = await ask(session, system("Be brief."), user("a"), assistant(first), user("b"))
    await ask(session, system("Be brief."), user("a"), assistant(first), user("b"), assistant(second), user("c"))
    assert kinds(session) == ["new", "continued", "continued"]
    assert all(extends_parent(node) for node in session.nodes[1:])
    [rollout] = session_rollouts(session, reward=1.0)
    [item] = stitch_rollouts([rollout], {(rollout.id, step.index): 1.0 for step in rollout.steps})
    assert ByteTemplate().decode(item.input_ids[item.action_mask]) == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("reply", "changes"),
    [
        ("two words", {"content": " two  words\n"}),
        (called({"a": 1, "b": [2]}), {"content": ""}),
        ("<think>Hm.</think>Yes", {"reasoning": ""}),
        (called({"a": 1}, prose="Adding. "), {"content": ""}),
    ],
    ids=["white space", "same calls", "reasoning left out", "text beside calls left out"],
)
async def test_another_spelling_is_healed(reply: str, changes: dict[str, Any]):
    session = make_session([reply, "end"])
    first = await ask(session, user("a"), tools=TOOLS)
    if first.tool_calls:
        spaced = json.dumps(json.loads(first.tool_calls[0]["function"]["arguments"]), indent=1)
        call = first.tool_calls[0]
        changes = changes | {"tool_calls": [{**call, "function": {**call["function"], "arguments": spaced}}]}
    await ask(session, user("a"), assistant(first, **changes), user("b"), tools=TOOLS)
    assert kinds(session) == ["new", "healed"]
    assert extends_parent(session.nodes[1])


@pytest.mark.parametrize("with_ids", [True, False])
async def test_an_edited_reply_forks_and_the_difference_is_named(with_ids: bool):
    session = make_session(["one", "two"])
    first = await ask(session, user("a"))
    edited = assistant(first, content="another", **({} if with_ids else {"ids": ()}))
    await ask(session, user("a"), edited, user("b"))
    node = session.nodes[1]
    assert (node.kind, node.parent) == ("forked", None)
    assert str(node.difference) == "message 1: recorded 'assistant: one', sent 'assistant: another'"
    assert len(session_rollouts(session)) == 2


async def test_edited_arguments_fork():
    session = make_session([called({"a": 1}), "two"])
    first = await ask(session, user("a"), tools=TOOLS)
    [call] = first.tool_calls
    edited = {**call, "function": {"name": "add", "arguments": '{"a": 2}'}}
    await ask(session, user("a"), assistant(first, tool_calls=[edited]), tool(call["id"], "3"), tools=TOOLS)
    assert kinds(session) == ["new", "forked"]


async def test_a_rewritten_system_prompt_forks():
    session = make_session(["one", "two"])
    first = await ask(session, system("It is 9:00."), user("a"))
    await ask(session, system("It is 9:01."), user("a"), assistant(first), user("b"))
    assert kinds(session) == ["new", "forked"]


async def test_branches_become_threads_and_each_call_is_in_one():
    session = make_session(["root", "left", "right", "left 2"])
    root = await ask(session, user("a"))
    left = await ask(session, user("a"), assistant(root), user("left"))
    await ask(session, user("a"), assistant(root), user("right"))
    await ask(session, user("a"), assistant(root), user("left"), assistant(left), user("more"))
    assert kinds(session) == ["new", "continued", "forked", "continued"]
    main, branch = session_rollouts(session, reward=2.0)
    assert [step.action for step in main.agent_steps] == ["root", "left", "left 2"]
    assert [step.action for step in branch.agent_steps] == ["right"]
    assert branch.meta["parent_step_id"] == main.agent_steps[0].id and branch.is_sub_task and not main.is_sub_task
    assert (main.total_reward, branch.total_reward) == (2.0, 0.0)
    assert extends_parent(session.nodes[2])
    assert trained_tokens(session) == recorded_tokens(session)


async def test_asking_again_supersedes_the_answer_that_was_not_used():
    session = make_session(["bad", "good", "end"])
    await ask(session, user("a"))
    second = await ask(session, user("a"))
    await ask(session, user("a"), assistant(second), user("b"))
    assert kinds(session) == ["new", "retried", "continued"]
    [rollout] = session_rollouts(session)
    assert [step.action for step in rollout.agent_steps] == ["good", "end"]


async def test_an_answer_that_the_client_goes_on_with_after_another_is_trained():
    session = make_session(["one", "two", "after two", "after one"])
    first = await ask(session, user("a"))
    second = await ask(session, user("a"))
    await ask(session, user("a"), assistant(second), user("b"))
    await ask(session, user("a"), assistant(first), user("c"))
    actions = [[step.action for step in rollout.agent_steps] for rollout in session_rollouts(session)]
    assert actions == [["one", "after one"], ["two", "after two"]]
    assert trained_tokens(session) == recorded_tokens(session)


async def test_of_histories_that_differ_in_white_space_the_exact_one_is_continued():
    session = make_session(["x", "x", "end"])
    await ask(session, user("spaces: a  b"))
    await ask(session, user("spaces: a   b"))
    await ask(session, user("spaces: a  b"), ClientMessage(role="assistant", content="x"), user("go on"))
    assert kinds(session) == ["new", "new", "continued"]
    assert session.nodes[2].parent is session.nodes[0]
    assert len(session_rollouts(session)) == 2, "another question is no retry"


async def test_several_answers_to_one_question_are_all_trained_if_none_is_continued():
    session = make_session(["one", "two", "three"])
    for _ in range(3):
        await ask(session, user("a"))
    assert kinds(session) == ["new", "retried", "retried"]
    rollouts = session_rollouts(session, reward=1.0)
    assert [step.action for rollout in rollouts for step in rollout.agent_steps] == ["three", "one", "two"]
    assert [rollout.total_reward for rollout in rollouts] == [1.0, 0.0, 0.0]


async def test_a_previous_id_stands_for_the_history():
    session = make_session(["one", "two"])
    first = await ask(session, system("Be brief."), user("a"))
    await ask(session, system("Be brief."), user("b"), previous_id=f"resp_{first.token}")
    assert kinds(session) == ["new", "continued"] and extends_parent(session.nodes[1])
    with pytest.raises(ConfigError, match="names no reply of this session"):
        await ask(session, user("c"), previous_id="resp_1")


async def test_a_prefilled_reply_is_refused():
    session = make_session(["one"])
    with pytest.raises(ConfigError, match="prefilled replies are not supported"):
        await ask(session, user("a"), ClientMessage(role="assistant", content="I"))
    assert not session.nodes


async def test_rewards_of_single_calls_and_components():
    session = make_session(["one", "two"])
    first = await ask(session, user("a"))
    second = await ask(session, user("a"), assistant(first), user("b"))
    [rollout] = session_rollouts(
        session, reward={"exact": 1.0, "short": 0.5}, call_rewards={f"chatcmpl-{first.token}": -0.25}
    )
    assert [step.kind for step in rollout.steps] == ["agent", "env", "agent", "env"]
    assert [turn.reward for turn in rollout.turns()] == [-0.25, 1.5]
    assert rollout.steps[-1].reward_components == {"exact": 1.0, "short": 0.5}
    assert rollout.steps[-1].terminated and rollout.stop is StopReason.TERMINATED
    with pytest.raises(ConfigError, match="which is not one of this session's"):
        session_rollouts(session, call_rewards={"chatcmpl-unknown": 1.0})
    [both] = session_rollouts(session, reward=1.0, call_rewards={second.token: 0.5})
    assert [turn.reward for turn in both.turns()] == [0.0, 1.5]


# --- random sessions ---

REAL = ["qwen2_5", "qwen3", "qwen3_instruct_2507"]
"""Templates whose tool calls are written as `called` writes them."""


class RandomClient:
    """Plays conversations that fork, edit, retry and hang up, and checks each call."""

    def __init__(self, session: Session, draw: Any) -> None:
        self.session, self.draw = session, draw
        self.conversations: list[list[ClientMessage]] = [[system("Be brief."), user("start")]]
        self.num_asked = 0

    async def act(self) -> None:
        action = self.draw(st.sampled_from(["ask", "ask", "ask", "fork", "edit", "retry", "hang up", "foreign", "new"]))
        conversation = self.draw(st.sampled_from(self.conversations))
        replies = [index for index, message in enumerate(conversation) if message.role == "assistant"]
        if action == "new":
            self.conversations.append([user(f"task {len(self.conversations)}")])
        elif action == "fork" and replies:
            cut = self.draw(st.sampled_from(replies)) + 1
            self.conversations.append([*conversation[:cut], user(f"branch {len(self.conversations)}")])
        elif action == "edit" and replies:
            at = self.draw(st.sampled_from(replies))
            conversation[at] = replace(conversation[at], content=f"edited {self.num_asked}")
        elif action == "foreign":
            conversation.insert(len(conversation) - 1, user("example"))
            conversation.insert(len(conversation) - 1, ClientMessage(role="assistant", content="never sampled"))
        else:
            await self.ask(conversation, action)

    async def ask(self, conversation: list[ClientMessage], action: str) -> None:
        self.num_asked += 1
        reply = await ask(self.session, *conversation, tools=TOOLS, is_delivered=action != "hang up")
        if action == "hang up":
            return
        if action == "retry":
            if self.draw(st.booleans()):  # and go on with both answers
                self.conversations.append([*conversation, *self.followed(reply)])
            reply = await ask(self.session, *conversation, tools=TOOLS)
        conversation += self.followed(reply)

    def followed(self, reply: Reply) -> list[ClientMessage]:
        results = [tool(call["id"], f"result {index}") for index, call in enumerate(reply.tool_calls)]
        return [self.spelled(reply), *(results or [user(f"go on {self.num_asked}")])]

    def spelled(self, reply: Reply) -> ClientMessage:
        changes: dict[str, Any] = {}
        if self.draw(st.booleans()):
            changes["reasoning"] = ""
        if self.draw(st.booleans()):
            changes["content"] = f"{reply.content} "
        if not reply.tool_calls and self.draw(st.booleans()):
            changes["ids"] = ()
        return assistant(reply, **changes)


def check_session(session: Session) -> None:
    for node in session.nodes:
        if node.trace is not None and node.parent is not None and not node.is_rerendered:
            assert extends_parent(node)
    rollouts = session_rollouts(session, reward=1.0)
    actions = [step.action for rollout in rollouts for step in rollout.steps if isinstance(step, AgentStep)]
    assert sorted(actions) == sorted(node.text for node in session.nodes if node.is_recorded)
    assert len(set(actions)) == len(actions), "the scripted replies differ"
    assert trained_tokens(session) == recorded_tokens(session)
    assert sum(rollout.total_reward for rollout in rollouts) == (1.0 if rollouts else 0.0)


@pytest.mark.parametrize("name", ["bytes", *REAL])
def test_every_sampled_token_of_a_random_session_is_trained_exactly_once(name: str):
    template: ChatTemplate = ByteTemplate(tool_parser=HermesToolParser()) if name == "bytes" else template_of(name)

    @settings(max_examples=60 if name == "bytes" else 15)
    @given(st.data())
    def play(data: st.DataObject) -> None:
        async def run() -> None:
            numbers = iter(range(10_000))

            def reply(request: Any) -> str:
                number = next(numbers)
                thinking = f"<think>thought {number}</think>" if number % 3 == 0 else ""
                return thinking + (called({"n": number}, {"n": -1}) if number % 2 else f"reply {number}")

            session = make_session(reply, template)
            client = RandomClient(session, data.draw)
            for _ in range(data.draw(st.integers(1, 14))):
                await client.act()
            session.close()
            check_session(session)

        asyncio.run(run())

    play()


@settings(max_examples=30)
@given(st.permutations(range(6)))
def test_the_order_in_which_branches_arrive_does_not_matter(order: Sequence[int]):
    async def play(order: Sequence[int]) -> set[tuple[bytes, int | None, str]]:
        asked: set[tuple[bytes, int | None, str]] = set()

        def reply(request: Any) -> str:
            text = f"answer to {len(request.prompt_token_ids)}"
            asked.add((request.prompt_token_ids.tobytes(), request.seed, text))
            return text

        session = make_session(reply, sampling_seed=5)
        root = await ask(session, user("a"))
        await ask(session, user("a"), assistant(root), user("first"))
        for number in order:
            await ask(session, user("a"), assistant(root), user(f"branch {number}"))
        assert session.counts["forked"] == len(order)
        return asked

    assert asyncio.run(play(order)) == asyncio.run(play(sorted(order)))
