"""The cookbook's renderers as chat templates: conversations go on by their stored tokens."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra 'tinker' is not installed")
pytest.importorskip(
    "tinker_cookbook", reason="tinker-cookbook is not installed (pip install --no-deps tinker-cookbook)"
)

from ludic.inference import HFChatTemplate
from ludic.inference.conversation import Conversation
from ludic.inference.dialogue import ChatDialogue
from ludic.inference.tinker_template import CookbookTemplate, tinker_template
from ludic.types import SamplingParams, TokenTrace
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
    for unknown in ("tiny", "nobody/nothing"):
        assert isinstance(tinker_template(unknown, TOKENIZER), HFChatTemplate)


def test_a_prompt_is_what_the_renderer_writes():
    shown = template().apply([SYSTEM, USER])
    assert shown.prompt_text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert shown.prompt_token_ids.tolist() == encode(shown.prompt_text)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("is_usual", [True, False])
def test_a_conversation_goes_on_by_what_was_sampled(is_closed: bool, is_usual: bool):
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
