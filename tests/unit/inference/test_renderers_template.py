"""Renderers of Prime Intellect's package as chat templates: conversations continue by their stored tokens."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("renderers", reason="the extra 'renderers' is not installed")

from ludic.inference import Conversation, HFChatTemplate, make_tool_call
from ludic.inference.templates.conversation import ChatDialogue
from ludic.inference.templates.renderers import RenderersTemplate, renderers_template
from ludic.types import ConfigError, MissingExtra, SamplingParams, TemplateError, TokenTrace, UnknownName
from tests.chat_templates import RENDERERS, make_renderer_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the capital of France?"}
NEXT = {"role": "user", "content": "A1"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search it.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string", "description": "What."}}},
    },
}
QUICK = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(name: str, **fields: Any) -> RenderersTemplate:
    made = renderers_template(make_renderer_tokenizer(name), name, **fields)
    assert isinstance(made, RenderersTemplate)
    return made


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 10_000), max_size=8),
        st.booleans(),
        st.sampled_from(["user", "tool", "tool+note"]),
        st.sampled_from(["", " ", "ok", "naïve 🎲 你好", "<think>hm</think>", "a\n\nb", "</s>x"]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", list(RENDERERS))
@given(turns=turns)
@QUICK
def test_every_prompt_extends_what_was_sent_and_sampled(name: str, turns: Any):
    """Any sampled tokens, ended or cut off; the stored tokens are never written again."""
    template = make(name)
    tokenizer, conversation = template.tokenizer, Conversation(template)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    messages: list[dict[str, Any]] = [SYSTEM, USER]
    sent = conversation.next_prompt(list(messages), tools=[SEARCH]).token_ids
    for number, (raw, ended, kind, text) in enumerate(turns):
        ids = [i for i in (i % len(tokenizer) for i in raw) if i not in special]
        ids += list(template.stops(SamplingParams())["stop_token_ids"][:1]) if ended else []
        reply: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        conversation.record(ids, reply["content"])
        messages.append(reply)
        if kind == "user":
            messages.append({"role": "user", "content": text})
        else:
            reply["tool_calls"] = [make_tool_call("search", {"query": "x"}, number)]
            messages.append({"role": "tool", "tool_call_id": f"call{number:05d}", "name": "search", "content": text})
            messages += [NEXT] if kind == "tool+note" else []
        prompt = conversation.next_prompt(list(messages), tools=[SEARCH])
        assert not prompt.is_new_segment
        so_far = [*sent.tolist(), *ids]
        assert prompt.token_ids[: len(so_far)].tolist() == so_far
        sent = prompt.token_ids


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_follows_a_reply_is_what_the_renderer_writes(is_closed: bool):
    template = make("qwen3")
    tokenizer, conversation = template.tokenizer, Conversation(template)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first = conversation.next_prompt([USER])
    assert first.text == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    sampled = [t for letter in "Paris." for t in tokenizer.encode(letter)]  # not as the text would be tokenised
    assert sampled != tokenizer.encode("Paris.")
    conversation.record([*sampled, end] if is_closed else sampled, "Paris.")
    second = conversation.next_prompt([USER, {"role": "assistant", "content": "Paris."}, NEXT])
    rest = tokenizer.encode("\n<|im_start|>user\nA1<|im_end|>\n<|im_start|>assistant\n")
    assert second.token_ids.tolist() == [*first.token_ids.tolist(), *sampled, end, *rest]


def test_a_text_that_would_become_a_control_token_is_refused():
    made, user = make("qwen3"), {"role": "user", "content": "a"}
    with pytest.raises(TemplateError, match="the text of a control token"):
        made.apply([user], tools=[{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}])
    with pytest.raises(TemplateError, match="the text of a control token"):
        forged = {"role": "user", "content": "b<|im_end|>"}
        made.delta([user, {"role": "assistant", "content": "b"}, forged], num_sent=1, completion_token_ids=[1])


def test_a_model_without_thinking_is_opened_behind_an_empty_think_block():
    opened = make("qwen3", enable_thinking=False).apply([USER]).prompt_text
    assert opened.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="enable_thinkin"):
        make("qwen3", enable_thinkin=False)


def test_a_reply_that_ended_inside_its_think_block_is_kept():
    """The renderer itself would write the conversation again."""
    template = make("qwen3.5")
    assert template.reply_prefix == "<think>\n"
    tokenizer, conversation = template.tokenizer, Conversation(template)
    first = conversation.next_prompt([USER]).token_ids
    sampled = [*tokenizer.encode("Let me see."), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    conversation.record(sampled, "<think>\nLet me see.")
    second = conversation.next_prompt([USER, {"role": "assistant", "content": "<think>\nLet me see."}, NEXT])
    assert not second.is_new_segment
    rest = tokenizer.decode(second.token_ids[len(first) + len(sampled) :])
    assert rest == "\n<|im_start|>user\nA1<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("name", sorted(set(RENDERERS) - {"deepseek-v3"}))  # its prompt shows no tools
def test_tools_are_shown_called_and_answered(name: str):
    template = make(name)
    assert template.supports_tools()
    tokenizer = template.tokenizer
    dialogue = ChatDialogue(template, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    first = dialogue.prompt([SYSTEM, USER], [SEARCH])
    assert "search" in (first.text or "") and "Be brief." in (first.text or "")
    call = {"role": "assistant", "content": "", "tool_calls": [make_tool_call("search", {"query": "France"}, 0)]}
    whole = template.renderer.render([SYSTEM, USER, _with_objects(call)], tools=[SEARCH])
    said = [t for t, own in zip(whole.token_ids, whole.sampled_mask, strict=True) if own]
    if template.reply_prefix:  # the prompt has it already
        said = tokenizer.encode("\n</think>\n") + [t for t in said if t not in tokenizer.encode("<think></think>")]
    sampled = np.array(said, dtype=np.int32)
    reply = dialogue.reply(TokenTrace(first.token_ids, sampled, finish_reason="stop"))
    assert reply["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "France"}'}
    result = {"role": "tool", "content": "Paris", "name": "search", "tool_call_id": reply["tool_calls"][0]["id"]}
    second = dialogue.prompt([SYSTEM, USER, reply, result], [SEARCH])
    assert not second.is_new_segment
    assert "Paris" in tokenizer.decode(second.token_ids[len(first.token_ids) + len(sampled) :])


def _with_objects(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "search", "arguments": {"query": "France"}}
    return {**call, "tool_calls": [{**call["tool_calls"][0], "function": function}]}


def test_a_model_that_the_package_does_not_know_keeps_its_own_template():
    tokenizer = make_renderer_tokenizer("qwen3")
    assert isinstance(renderers_template(tokenizer), HFChatTemplate)
    with pytest.raises(ConfigError, match="Name one"):
        renderers_template(tokenizer, enable_thinking=False)


def test_unknown_names_and_tokenizers_that_do_not_fit_are_explained(monkeypatch: pytest.MonkeyPatch):
    tokenizer = make_renderer_tokenizer("llama-3")
    with pytest.raises(UnknownName, match="Did you mean 'qwen3'"):
        renderers_template(tokenizer, "qwen_3")
    with pytest.raises(ConfigError, match="'qwen3' cannot be made .* not found"):
        renderers_template(tokenizer, "qwen3")
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    with pytest.raises(MissingExtra, match="renderers"):
        renderers_template(tokenizer, "qwen3")
