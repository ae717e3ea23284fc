import asyncio
import itertools

import numpy as np
import pytest

from ludic.agents import Agent
from ludic.context import FullDialog, SlidingWindow, TruncatedThinkingContext
from ludic.inference import ByteTemplate, InferenceSpec, ReturnSpec, SamplingParams, ScriptedClient
from ludic.parsers import ParseResult
from ludic.types import (
    ChatResponse,
    ContextError,
    PromptTooLong,
    TokenMismatch,
)
from tests.fakes import RecordingClient, make_agent


def ready(replies, **kwargs) -> Agent:
    agent = make_agent(replies, **kwargs)
    agent.reset("be good")
    agent.on_env_reset("obs", {})
    return agent


async def test_act_returns_one_parsed_step_with_its_trace():
    agent = ready(["<a>x</a>"])
    result = await agent.act(InferenceSpec(return_=ReturnSpec.for_rl(), sampling=SamplingParams(temperature=0.3)))
    step = result.final_step
    assert len(result.steps) == 1 and step.action == "<a>x</a>" and step.parse_result == ParseResult("x", 0.1, None)
    assert step.action_target == "env" and step.loop_index == 0
    assert [m["content"] for m in step.prompt_messages] == ["be good", "obs"]
    assert step.trace.completion_logprobs is not None and step.trace.temperature == 0.3
    assert step.trace.policy_version == 0 and step.info == {"finish_reason": "stop"} == agent.last_info


async def test_traces_of_several_turns_equal_the_clients_requests():
    client = RecordingClient(ScriptedClient(["<a>1</a>", "<a>2</a>", "<a>3</a>"]))
    agent = ready(client)
    traces = []
    for turn in range(3):
        traces.append((await agent.act()).final_step.trace)
        agent.on_after_step(f"obs{turn}", {})
    assert [(t.prompt_token_ids.tolist(), t.completion_token_ids.tolist()) for t in traces] == client.calls
    for before, after in itertools.pairwise(traces):
        so_far = [*before.prompt_token_ids, *before.completion_token_ids]
        assert after.prompt_token_ids[: len(so_far)].tolist() == so_far


async def test_a_reply_cut_off_by_the_token_limit_is_rejected_but_kept_in_the_context():
    agent = ready(["<a>x</a>"])
    step = (await agent.act(InferenceSpec(sampling=SamplingParams(max_tokens=3)))).final_step
    assert step.parse_result.action is None and step.parse_result.reward == -0.1
    assert "cut off" in step.parse_result.obs and step.info["incomplete_completion"] is True
    assert agent.ctx.messages[-1] == {"role": "assistant", "content": "<a>"}


async def test_a_prompt_above_max_prompt_tokens_is_refused():
    with pytest.raises(PromptTooLong, match="limit is 5"):
        await ready(["x"], max_prompt_tokens=5).act()


async def test_a_server_that_changes_the_prompt_is_a_token_mismatch():
    class AddsBos(ScriptedClient):
        async def complete_tokens(self, request):
            response, info = await super().complete_tokens(request)
            echoed = [1, *request.prompt_token_ids.tolist()]
            return (
                ChatResponse(
                    text=response.text, prompt_token_ids=echoed, completion_token_ids=response.completion_token_ids
                ),
                info,
            )

    with pytest.raises(TokenMismatch, match="AddsBos.*differs"):
        await ready(AddsBos(["x"])).act()


async def test_a_slow_model_times_out():
    class Slow(ScriptedClient):
        async def complete_tokens(self, request):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await ready(Slow([])).act(timeout_s=0.01)


async def test_large_client_facts_are_dropped_from_step_info():
    class Chatty(ScriptedClient):
        async def complete_tokens(self, request):
            response, _ = await super().complete_tokens(request)
            return response, {"raw_response": {"huge": 1}, "used_args": {}, "prompt_token_ids": [1], "queue_ms": 3}

    step = (await ready(Chatty(["<a>x</a>"])).act()).final_step
    assert step.info == {"queue_ms": 3, "finish_reason": "stop"}


async def test_an_undeclared_rewrite_of_history_is_refused():
    class Forgetful(FullDialog):
        def on_before_act(self):
            return super().on_before_act()[-1:]

    agent = ready(["<a>1</a>", "<a>2</a>"], ctx=Forgetful())
    await agent.act()
    agent.on_after_step("obs2", {})
    with pytest.raises(ContextError, match=r"Forgetful.*rewrites_history"):
        await agent.act()


async def test_an_undeclared_change_of_a_reply_is_refused():
    class Tidy(FullDialog):
        def on_after_act(self, response):
            self.add_assistant_step(response.text.upper())

    agent = ready(["<a>x</a>", "<a>y</a>"], ctx=Tidy())
    await agent.act()
    agent.on_after_step("obs2", {})
    with pytest.raises(ContextError, match="Tidy"):
        await agent.act()


@pytest.mark.parametrize(
    ("ctx", "replies"),
    [
        (TruncatedThinkingContext(), ["<think>long</think><a>x</a>"] * 3),
        (SlidingWindow(max_turns=1), ["<a>x</a>"] * 3),
    ],
)
async def test_a_declared_rewrite_starts_a_new_segment(ctx, replies):
    template = ByteTemplate()
    agent = ready(replies, ctx=ctx, chat_template=template)
    for turn in range(3):
        step = (await agent.act()).final_step
        rendered = template.apply(list(step.prompt_messages)).prompt_token_ids
        assert step.trace.prompt_token_ids.tolist() == rendered.tolist()
        agent.on_after_step(f"obs{turn}", {})


async def test_a_context_that_edits_messages_in_place_is_refused():
    class Editor(FullDialog):
        def on_before_act(self):
            for message in self._messages[:-1]:
                message["content"] = "[old]"
            return super().on_before_act()

    agent = ready(["<a>1</a>", "<a>2</a>"], ctx=Editor())
    first = (await agent.act()).final_step
    agent.on_after_step("obs2", {})
    with pytest.raises(ContextError, match="Editor"):
        await agent.act()
    assert [m["content"] for m in first.prompt_messages] == ["[old]", "obs"]  # as it was shown then


async def test_traces_are_independent_of_the_clients_buffers():
    class Reuses(ScriptedClient):
        def __init__(self, replies):
            super().__init__(replies)
            self.buffer = np.zeros(9, np.int32)

        async def complete_tokens(self, request):
            response, info = await super().complete_tokens(request)
            self.buffer[: len(response.completion_token_ids)] = response.completion_token_ids
            response.completion_token_ids = self.buffer[: len(response.completion_token_ids)]
            return response, info

    agent = ready(Reuses(["<a>1</a>", "<a>2</a>"]))
    first = (await agent.act()).final_step.trace
    agent.on_after_step("obs", {})
    await agent.act()
    assert agent.chat_template.decode_reply(first.completion_token_ids) == "<a>1</a>"


async def test_reply_text_includes_a_think_tag_opened_by_the_prompt():
    from functools import partial

    from ludic.inference import HFChatTemplate
    from ludic.parsers import think_prefix_parser
    from tests.chat_templates import QWEN_STYLE, with_template

    opened = QWEN_STYLE.replace(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    )
    assert opened != QWEN_STYLE
    tokenizer = with_template("qwen", opened)
    template = HFChatTemplate(tokenizer)
    assert template.reply_prefix == "<think>\n"
    client = ScriptedClient(["hm</think>A1", "hm</think>B2"], tokenizer=tokenizer)
    agent = ready(client, chat_template=template, parser=partial(think_prefix_parser, success_reward=0.0))
    step = (await agent.act()).final_step
    assert step.action == "<think>\nhm</think>A1" and step.parse_result.action == "A1"
    agent.on_after_step("obs2", {})
    second = (await agent.act()).final_step.trace
    so_far = [*step.trace.prompt_token_ids, *step.trace.completion_token_ids]
    assert second.prompt_token_ids[: len(so_far)].tolist() == so_far
