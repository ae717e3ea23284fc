"""Training uses exactly the tokens that the server saw and sampled, over turns and tool calls."""

import numpy as np
import pytest

from ludic.inference import ByteTemplate, HermesToolParser
from ludic.tools import Tool
from ludic.types import ConfigError, SamplingParams
from rolo import (
    Action,
    Message,
    RolloutGenerator,
    State,
    ToolCall,
    TrainingBatch,
)
from rolo.library import ChatRenderer, ClientPolicy, saw_batch
from tests.fakes import RandomTokenClient, RecordingClient, ScriptedClient

BYTES = ByteTemplate()
TOOLS = ByteTemplate(tool_parser=HermesToolParser())


class Chat:
    """Five turns. With `forget`, the third one shows only the newest message."""

    def __init__(self, example):
        self.forget, self.num_turns = example.get("forget", False), 0
        self.messages = (Message("user", "Begin."),)

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> State | None:
        self.num_turns += 1
        if self.num_turns == 5:
            return None
        new = Message("user", f"Turn {self.num_turns}.")
        self.messages = (new,) if self.forget and self.num_turns == 3 else (*self.messages, action.message, new)
        return State(self.messages)


class Builder:
    def __init__(self, env):
        self.build = env


def random_bytes() -> RecordingClient:
    """Most of what it samples is no valid UTF-8: its text does not lead back to its tokens."""
    return RecordingClient(RandomTokenClient(vocab_size=261, end_ids=(BYTES.END,), decode=BYTES.decode_reply))


async def play(env, template, client, *, max_tokens=12, max_turns=5, example=None):
    generator = RolloutGenerator(
        env_builder=Builder(env), renderer=ChatRenderer(template, BYTES.decode_reply), max_turns=max_turns
    )
    policy = ClientPolicy(client, SamplingParams(temperature=1.0, max_tokens=max_tokens))
    [[trajectory]] = await generator.generate([example or {}], policy=policy, samples_per_prompt=1, seed=5)
    return trajectory


async def test_every_prompt_begins_with_all_that_was_sent_and_sampled_before():
    client = random_bytes()
    trajectory = await play(Chat, BYTES, client)
    assert len(client.calls) == 5 and "�" in trajectory.last_action.text
    for (sent, sampled), (following, _) in zip(client.calls, client.calls[1:], strict=False):
        assert following[: len(sent) + len(sampled)] == sent + sampled
    for step, (sent, sampled) in zip(trajectory.steps, client.calls, strict=True):
        assert (list(step.completion.prompt.token_ids), list(step.completion.token_ids)) == (sent, sampled)


async def test_an_episode_becomes_one_item_in_which_exactly_the_sampled_tokens_are_trained():
    client = random_bytes()
    trajectory = await play(Chat, BYTES, client)
    (item,) = saw_batch(TrainingBatch([trajectory], [0.75]), 1.0).items
    last_sent, last_sampled = client.calls[-1]
    assert item.input_ids.tolist() == last_sent + last_sampled
    assert item.input_ids[item.action_mask].tolist() == [t for _, sampled in client.calls for t in sampled]
    logprobs = np.concatenate([step.completion.logprobs for step in trajectory.steps])
    assert np.array_equal(item.actor_logps, logprobs)
    assert item.weight == 0.75 and not item.origin.episode_truncated


async def test_an_env_that_rewrites_history_starts_a_new_item_and_no_token_is_lost_or_trained_twice():
    client = random_bytes()
    trajectory = await play(Chat, BYTES, client, example={"forget": True})
    items = saw_batch(TrainingBatch([trajectory], [0.5]), 1.0).items
    assert len(items) == 2 and {item.weight for item in items} == {0.5}
    trained = [t for item in items for t in item.input_ids[item.action_mask].tolist()]
    assert trained == [t for _, sampled in client.calls for t in sampled]


class Shop:
    """One tool; what it answers is shown until the model says something else."""

    def __init__(self, example):
        self.messages = (Message("user", "What is it?"),)

    def price(self, item: str) -> str:
        """What an item costs."""
        return f"{item}: 3"

    def start(self) -> State:
        return State(self.messages, (Tool.from_callable(self.price).schema,))

    def step(self, action: Action) -> State | None:
        if not action.tool_calls:
            return None
        results = [Message("tool", "3", tool_call_id=call.id, name="price") for call in action.tool_calls]
        self.messages += (action.message, *results)
        return State(self.messages, (Tool.from_callable(self.price).schema,))


CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'


async def test_tool_calls_reach_the_env_and_the_conversation_goes_on_token_for_token():
    client = RecordingClient(ScriptedClient([f"Let me see. {CALL}", f"{CALL}{CALL}", "Three."]))
    trajectory = await play(Shop, TOOLS, client, max_tokens=400)
    first, second, third = (step.action for step in trajectory.steps)
    assert first.text == "Let me see." and [call.id for call in first.tool_calls] == ["call00000"]
    assert [call.id for call in second.tool_calls] == ["call00001", "call00002"], "numbered over the episode"
    assert third.text == "Three." and not third.tool_calls and trajectory.is_finished
    assert "price" in BYTES.decode(client.calls[0][0]), "the prompt names the tool"
    (item,) = saw_batch(TrainingBatch([trajectory], [1.0]), 1.0).items
    assert item.input_ids[item.action_mask].tolist() == [t for _, sampled in client.calls for t in sampled]


async def test_a_truncated_or_unparseable_tool_call_is_no_call():
    cut = await play(Shop, TOOLS, ScriptedClient([CALL]), max_tokens=len(CALL) - 2)
    assert cut.last_action.is_cut_off and not cut.last_action.tool_calls
    broken = await play(Shop, TOOLS, ScriptedClient(["<tool_call>{price}</tool_call>"]), max_tokens=99)
    assert not broken.last_action.tool_calls and "<tool_call>" in broken.last_action.text


async def test_tools_that_a_template_cannot_read_or_does_not_show_are_refused():
    with pytest.raises(ConfigError, match=r"offered \(price\), but the chat template cannot read tool calls"):
        await play(Shop, BYTES, ScriptedClient(["hi"]))

    class Silent(ByteTemplate):
        def apply(self, messages, *, tools=None, add_generation_prompt=True):
            return super().apply(messages, add_generation_prompt=add_generation_prompt)

    with pytest.raises(ConfigError, match="never hear of them"):
        await play(Shop, Silent(tool_parser=HermesToolParser()), ScriptedClient(["hi"]))


async def test_a_seed_decides_what_is_drawn():
    client = random_bytes()
    first, second = await play(Chat, BYTES, client), await play(Chat, BYTES, client)
    assert client.calls[:5] == client.calls[5:]
    assert np.array_equal(first.steps[0].completion.logprobs, second.steps[0].completion.logprobs)


def test_a_truncated_distribution_is_refused():
    with pytest.raises(ConfigError, match=r"top_p=0\.9"):
        ClientPolicy(random_bytes(), SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4))


def test_messages_have_the_shape_that_templates_take():
    call = ToolCall("call1", "price", '{"item": "tea"}')
    for message in (
        Message("user", "hi"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "3", tool_call_id="call1", name="price"),
    ):
        assert Message.from_dict(message.as_dict()) == message
    function = {"name": "price", "arguments": '{"item": "tea"}'}
    assert Message("assistant", "", (call,)).as_dict() == {
        "role": "assistant", "content": "", "tool_calls": [{"id": "call1", "type": "function", "function": function}],
    }  # fmt: skip
