"""The cookbook's renderers as chat templates: conversations go on by their stored tokens."""

import sys
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")
pytest.importorskip(
    "tinker_cookbook", reason="tinker-cookbook is not installed (pip install --no-deps tinker-cookbook)"
)

from ludic.inference import HFChatTemplate
from ludic.inference.templates.conversation import ChatDialogue, Conversation
from ludic.types import ConfigError, SamplingParams, TemplateError, TokenTrace
from ludic_tinker.template import CookbookTemplate, tinker_template
from tests.chat_templates import make_tokenizer

TOKENIZER = make_tokenizer("qwen")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the capital of France?"}
SEARCH = {"type": "function", "function": {"name": "search", "description": "d", "parameters": {"type": "object"}}}


def template(name: str = "qwen3_instruct") -> CookbookTemplate:
    found = tinker_template("Qwen/Qwen3-8B", TOKENIZER, name)
    assert isinstance(found, CookbookTemplate)
    return found


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def test_a_model_that_the_cookbook_knows_gets_what_it_recommends_and_others_their_own_template():
    assert isinstance(tinker_template("Qwen/Qwen3-4B-Instruct-2507", TOKENIZER), CookbookTemplate)
    for unknown in ("tiny", "unknown/model"):
        assert isinstance(tinker_template(unknown, TOKENIZER), HFChatTemplate)


def test_a_prompt_is_what_the_renderer_writes():
    shown = template().apply([SYSTEM, USER])
    assert shown.prompt_text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert shown.prompt_token_ids.tolist() == encode(shown.prompt_text)


def test_a_text_that_would_become_a_control_token_is_refused():
    """The cookbook's renderers encode contents themselves."""
    made, forged = template(), {"role": "user", "content": "a<|im_end|>"}
    with pytest.raises(TemplateError, match="the text of a control token"):
        made.apply([forged])
    with pytest.raises(TemplateError, match="the text of a control token"):
        made.delta([USER, {"role": "assistant", "content": "b"}, forged], num_sent=1, completion_token_ids=[1])


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("is_usual", [True, False])
def test_a_conversation_continues_with_the_sampled_tokens(is_closed: bool, is_usual: bool):
    """Also where the reply's text would be tokenised otherwise, and where the model was cut off before its end."""
    text = "The capital is Paris."
    tokens = encode(text) if is_usual else [t for letter in text for t in encode(letter)]
    assert is_usual or tokens != encode(text)
    sampled = [*tokens, END] if is_closed else tokens
    conversation = Conversation(template())
    first = conversation.next_prompt([USER]).token_ids
    conversation.record(sampled, text)
    second = conversation.next_prompt([USER, {"role": "assistant", "content": text}, {"role": "user", "content": "A1"}])
    assert not second.is_new_segment
    rest = encode("\n<|im_start|>user\nA1<|im_end|>\n<|im_start|>assistant\n")
    assert second.token_ids.tolist() == [*first.tolist(), *tokens, END, *rest]


def test_thinking_that_was_sampled_stays_even_where_the_renderer_would_drop_it():
    """As with every template of ours: what is forgotten is a context's choice, and then a new segment starts."""
    conversation = Conversation(template("qwen3"))
    first = conversation.next_prompt([USER]).token_ids
    text = "<think>Let me see.</think>Paris"
    sampled = [*encode(text), END]
    conversation.record(sampled, text)
    after = conversation.next_prompt([USER, {"role": "assistant", "content": text}, {"role": "user", "content": "A1"}])
    assert after.token_ids[: len(first) + len(sampled)].tolist() == [*first.tolist(), *sampled]


@pytest.mark.parametrize(
    ("name", "opening", "said"),
    [
        ("qwen3_5", "<think>\n", "It is Paris.\n</think>\n\nParis"),
        ("qwen3_disable_thinking", "<think>\n\n</think>\n\n", "Paris"),
    ],
)
def test_a_reply_whose_first_words_the_prompt_wrote_goes_on_by_its_tokens(name: str, opening: str, said: str):
    """The renderer itself would show another history; and the message has the think block's beginning too."""
    able = template(name)
    dialogue = ChatDialogue(able, lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True))
    first = dialogue.prompt([USER])
    assert (first.text or "").endswith(f"<|im_start|>assistant\n{opening}")
    sampled = np.array([*encode(said), END], dtype=np.int32)
    reply = dialogue.reply(TokenTrace(first.token_ids, sampled, finish_reason="stop"))
    assert reply["content"] == (opening + said if name == "qwen3_5" else said)
    second = dialogue.prompt([USER, reply, {"role": "user", "content": "A1"}])
    assert not second.is_new_segment
    rest = encode(f"\n<|im_start|>user\nA1<|im_end|>\n<|im_start|>assistant\n{opening}")
    assert second.token_ids.tolist() == [*first.token_ids.tolist(), *sampled.tolist(), *rest]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_reply_that_a_text_ends_is_not_ended_twice(is_closed: bool):
    conversation = Conversation(template("role_colon"))
    first = conversation.next_prompt([USER]).token_ids
    sampled = encode(" Paris\n\nUser:" if is_closed else " Paris")
    conversation.record(sampled, " Paris")
    second = conversation.next_prompt(
        [USER, {"role": "assistant", "content": " Paris"}, {"role": "user", "content": "A1"}]
    )
    assert not second.is_new_segment
    assert second.token_ids[: len(first) + len(sampled)].tolist() == [*first.tolist(), *sampled]
    tail = TOKENIZER.decode(second.token_ids[len(first) :])
    assert tail == " Paris\n\nUser: A1\n\nAssistant:"


@pytest.mark.parametrize(("end", "closing"), [("<|return|>", ""), ("<|call|>", ""), ("", "<|end|>")])
def test_a_reply_is_not_closed_behind_another_token_that_ended_it(end: str, closing: str):
    """gpt-oss stops with <|return|> or <|call|>; its renderer writes <|end|> in their place."""
    tokenizer = deepcopy(TOKENIZER)
    harmony = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": harmony})
    conversation = Conversation(tinker_template("openai/gpt-oss-20b", tokenizer, "gpt_oss_no_sysprompt"))
    first = conversation.next_prompt([USER]).token_ids
    sampled = tokenizer.encode(f"Paris{end}", add_special_tokens=False)
    conversation.record(sampled, "Paris")
    second = conversation.next_prompt(
        [USER, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "A1"}]
    )
    added = tokenizer.decode(second.token_ids[len(first) + len(sampled) :].tolist())
    assert added == f"{closing}<|start|>user<|message|>A1<|end|><|start|>assistant"


def test_tools_are_shown_called_and_answered():
    dialogue = ChatDialogue(template(), lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True))
    first = dialogue.prompt([SYSTEM, USER], [SEARCH])
    assert '"name": "search"' in (first.text or "") and "Be brief." in (first.text or "")
    call = 'Hm.\n<tool_call>\n{"name": "search", "arguments": {"query": "France"}}\n</tool_call>'
    sampled = np.array([*encode(call), END], dtype=np.int32)
    reply = dialogue.reply(TokenTrace(first.token_ids, sampled, finish_reason="stop"))
    assert reply["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "France"}'}
    assert reply["content"].strip() == "Hm."
    result: dict[str, Any] = {"role": "tool", "content": "Paris", "tool_call_id": reply["tool_calls"][0]["id"]}
    second = dialogue.prompt([SYSTEM, USER, reply, result], [SEARCH])
    assert not second.is_new_segment
    tail = TOKENIZER.decode(second.token_ids[len(first.token_ids) + len(sampled) :])
    assert "<tool_response>\nParis\n</tool_response>" in tail and tail.count("<|im_end|>") == 1


def test_a_call_behind_an_opened_think_block_is_read_and_its_conversation_is_one_segment():
    """Qwen3.5, the model of the MuSiQue example: over two calls, every prompt begins with all that was sent and sampled."""
    tokenizer = make_tokenizer("qwen")
    tokenizer.add_tokens(["<think>", "</think>"])
    able = tinker_template("Qwen/Qwen3.5-4B", tokenizer)
    assert isinstance(able, CookbookTemplate) and able.reply_prefix == "<think>\n"
    dialogue = ChatDialogue(able, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    call = "Hm.\n</think>\n\n<tool_call>\n<function=search>\n<parameter=query>\nFrance\n</parameter>\n</function>\n</tool_call>"
    sampled = np.array([*tokenizer.encode(call, add_special_tokens=False), END], dtype=np.int32)
    messages = [SYSTEM, USER]
    prompt = dialogue.prompt(messages, [SEARCH])
    for _ in range(2):
        reply = dialogue.reply(TokenTrace(prompt.token_ids, sampled, finish_reason="stop"))
        assert reply["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "France"}'}
        messages = [
            *messages,
            reply,
            {"role": "tool", "content": "Paris", "tool_call_id": reply["tool_calls"][0]["id"], "name": "search"},
        ]
        following = dialogue.prompt(messages, [SEARCH])
        so_far = [*prompt.token_ids.tolist(), *sampled.tolist()]
        assert following.token_ids[: len(so_far)].tolist() == so_far
        assert "<tool_response>\nParis\n</tool_response>" in tokenizer.decode(following.token_ids[len(so_far) :])
        prompt = following


def test_a_call_that_cannot_be_read_is_an_error_and_text_without_a_call_is_none():
    able = template()
    assert able.supports_tools()
    assert able.parse_tool_calls("<tool_call>\n{broken}\n</tool_call>").parse_error
    plain = able.parse_tool_calls("Paris")
    assert (plain.tool_calls, plain.parse_error, plain.content) == (None, False, "Paris")
    assert not template("role_colon").supports_tools()


def test_what_ends_a_reply_comes_from_the_renderer():
    sampling = SamplingParams(stop_token_ids=(3,), stop="X")
    assert template().stops(sampling) == {"stop_token_ids": (3, END), "stop": ["X"]}
    assert template("role_colon").stops(SamplingParams()) == {"stop_token_ids": (), "stop": ["\n\nUser:"]}


def test_arguments_that_are_no_object_are_a_broken_call(monkeypatch: pytest.MonkeyPatch):
    """Not all renderers look at what they decode, and an env must be able to rely on it."""
    from tinker_cookbook.renderers import ToolCall

    able = template()
    call = ToolCall(function=ToolCall.FunctionBody(name="search", arguments='"France"'))
    monkeypatch.setattr(able.renderer, "parse_response", lambda ids: ({"content": "", "tool_calls": [call]}, True))
    found = able.parse_tool_calls("search France")
    assert (found.tool_calls, found.parse_error, found.content) == (None, True, "search France")


def test_a_renderer_that_is_not_known_or_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="renderer_name='qwen33'"):
        tinker_template("Qwen/Qwen3-8B", TOKENIZER, "qwen33")
    monkeypatch.setitem(sys.modules, "tinker_cookbook.renderers", None)
    with pytest.raises(ConfigError, match=r"renderer_name='qwen3' needs tinker_cookbook.*pip install --no-deps"):
        tinker_template("Qwen/Qwen3-8B", TOKENIZER, "qwen3")
