"""Which token came from which message: the spans of every chat template cover every token once."""

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludic.inference import ByteTemplate, ChatTemplate, Conversation, HermesToolParser, HFChatTemplate, make_tool_call
from ludic.types import Message
from tests.chat_templates import RENDERERS, make_renderer_tokenizer, make_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }
]
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
texts = st.sampled_from(
    [
        "ok",
        "The capital is Paris.",
        "naïve 🎲 你好",
        "a\n\nb",
        " led by a space",
        "user",
        "<think>hm</think> so",
        "x" * 30,
    ]
)


def make_template(name: str) -> tuple[ChatTemplate, Any]:
    """A template, and its function from tokens to text."""
    if name == "byte":
        byte = ByteTemplate(tool_parser=HermesToolParser())
        return byte, byte.decode
    if name.startswith("renderers "):
        pytest.importorskip("renderers", reason="the extra 'renderers' is not installed")
        from ludic.inference.templates.renderers import renderers_template

        name = name.removeprefix("renderers ")
        tokenizer = make_renderer_tokenizer(name)
        return renderers_template(tokenizer, name), lambda ids: tokenizer.decode(list(ids))
    if name.startswith("cookbook "):
        pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
        from ludic_tinker.template import tinker_template

        tokenizer = make_tokenizer("qwen")
        made = tinker_template("", tokenizer, name.removeprefix("cookbook "))
        return made, lambda ids: tokenizer.decode(list(ids))
    tokenizer = make_tokenizer(name)
    return HFChatTemplate(tokenizer, tool_parser=HermesToolParser()), lambda ids: tokenizer.decode(list(ids))


@st.composite
def dialogues(draw: Any) -> list[tuple[str, str, str]]:
    """(reply, what follows it, its text) of each turn."""
    kinds = st.sampled_from(["user", "tool", "two tools", "tool+note"])
    return [(draw(texts), draw(kinds), draw(texts)) for _ in range(draw(st.integers(1, 3)))]


def check(spans: Any, num_tokens: int) -> None:
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == num_tokens
    for span in spans:
        assert span.start <= span.text_start <= span.text_end <= span.end
        assert span.start < span.end


def play(
    template: ChatTemplate, encode: Any, end: int, turns: Any, tools: Any, system: bool
) -> list[tuple[Any, list[Message]]]:
    """The prompts of a dialogue with the messages of each."""
    conversation = Conversation(template)
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    messages.append({"role": "user", "content": "begin"})
    prompts = []
    for number, (reply, kind, text) in enumerate(turns):
        prompts.append((conversation.next_prompt(list(messages), tools=tools, with_spans=True), list(messages)))
        message: Message = {"role": "assistant", "content": reply}
        if "tool" in kind:
            message["tool_calls"] = [
                make_tool_call("calculator", {"x": "1"}, 2 * number + n) for n in range(1 + (kind == "two tools"))
            ]
        conversation.record([*encode(reply), end], reply)
        messages.append(message)
        if kind == "user":
            messages.append({"role": "user", "content": text})
            continue
        for call in message["tool_calls"]:
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": "calculator", "content": text + call["id"]}
            )
        if kind == "tool+note":
            messages.append({"role": "user", "content": "Answer now."})
    prompts.append((conversation.next_prompt(list(messages), tools=tools, with_spans=True), list(messages)))
    return prompts


@pytest.mark.parametrize(
    "name",
    ["byte", "qwen", "llama3", "mistral", *(f"renderers {name}" for name in RENDERERS), "cookbook qwen3_instruct"],
)
@given(turns=dialogues(), with_tools=st.booleans(), system=st.booleans())
@QUICK
def test_spans_cover_every_token_once_and_hold_the_text_of_their_message(
    name: str, turns: Any, with_tools: bool, system: bool
):
    template, decode = make_template(name)
    if name == "byte":
        encode, end = template.encode, ByteTemplate.END
    else:
        encode = partial(template.tokenizer.encode, add_special_tokens=False)
        end = template.tokenizer.eos_token_id
    if "llama" in name:
        turns = [(reply, "tool" if kind == "two tools" else kind, text) for reply, kind, text in turns]
    for prompt, messages in play(template, encode, end, turns, TOOLS if with_tools else None, system):
        spans = prompt.message_spans
        check(spans, len(prompt.token_ids))
        shown = {}
        for span in spans:
            assert span.message not in shown, "one span per message"
            shown[span.message] = span
            if 0 <= span.message < len(messages):
                assert span.role == messages[span.message]["role"]
        for index, message in enumerate(messages):
            span = shown[index]
            inside = decode(prompt.token_ids[span.start : span.end])
            text = message["content"].strip()
            as_json = json.dumps(text, ensure_ascii=False)[1:-1]  # some templates show results of tools so
            assert text in inside or (message["role"] == "tool" and as_json in inside)
