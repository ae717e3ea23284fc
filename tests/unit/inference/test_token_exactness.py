"""Rule 1: the next prompt is the stored tokens plus the template's delta, bit for bit, over real templates."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludic.inference import Conversation, HermesToolParser, HFChatTemplate, make_tool_call
from ludic.types import TemplateError
from tests.chat_templates import make_tokenizer, with_template

pytestmark = pytest.mark.slow

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]
SLOW_IS_FINE = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
DIALOGUE_STYLES = ["qwen", "llama3", "mistral"]

texts = st.one_of(
    st.sampled_from(["", " ", "ok", "count=3", "naïve 🎲 你好", "<think>hm</think>", "a\n\nb", "{{ x }}", "</s>x"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
replies = st.builds(lambda ids, ended: (ids, ended), st.lists(st.integers(0, 10_000), max_size=8), st.booleans())


@st.composite
def dialogues(draw: Any) -> list[tuple[tuple[list[int], bool], str, Any]]:
    """Turns of (sampled ids, did it end its turn), what follows ("user" or "tool"), and the texts of that."""
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["user", "tool", "tool+note"]))
        turns.append((draw(replies), kind, draw(texts)))
    return turns


def play(
    style: str, turns: Any, tools: Any = TOOLS
) -> tuple[HFChatTemplate, list[tuple[np.ndarray, list[int]]], list[Any]]:
    """Run a dialogue through a Conversation; what the server saw and sampled at every call."""
    tokenizer = make_tokenizer(style)
    template = HFChatTemplate(tokenizer, tool_parser=HermesToolParser())
    conversation = Conversation(template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    calls = []
    prompts = []
    for number, ((raw_ids, ended), kind, text) in enumerate(turns):
        prompt = conversation.next_prompt(list(messages), tools=tools)
        prompts.append(prompt)
        ids = [i % len(tokenizer) for i in raw_ids]
        if ended:
            ids.append(tokenizer.eos_token_id)
        calls.append((prompt.token_ids, ids))
        content = tokenizer.decode(ids, skip_special_tokens=True)
        reply: dict[str, Any] = {"role": "assistant", "content": content}
        if kind.startswith("tool"):
            reply["tool_calls"] = [make_tool_call("calculator", {"x": "1"}, number)]
        messages.append(reply)
        conversation.record(ids, content)
        if kind == "user":
            messages.append({"role": "user", "content": text})
        else:
            messages.append(
                {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "calculator", "content": text}
            )
            if kind == "tool+note":
                messages.append({"role": "user", "content": "Answer now."})
    prompts.append(conversation.next_prompt(list(messages), tools=tools))
    return template, calls, prompts


@pytest.mark.parametrize("style", DIALOGUE_STYLES)
@given(turns=dialogues())
@SLOW_IS_FINE
def test_every_prompt_extends_what_was_sent_and_sampled(style: str, turns: Any):
    _, calls, prompts = play(style, turns)
    for (sent, sampled), following in zip(calls, prompts[1:], strict=True):
        so_far = [*sent.tolist(), *sampled]
        assert following.token_ids[: len(so_far)].tolist() == so_far
        assert not following.rewrote_history


@pytest.mark.parametrize("style", DIALOGUE_STYLES)
@given(turns=dialogues())
@SLOW_IS_FINE
def test_what_is_appended_reads_as_the_template_writes_it(style: str, turns: Any):
    """The delta, decoded, holds the new messages and ends where the next reply begins."""
    template, calls, prompts = play(style, turns)
    openings = {
        "qwen": ("<|im_start|>assistant\n",),
        "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        "mistral": ("[/INST]", "[/TOOL_RESULTS]"),
    }[style]
    for (sent, sampled), following, (_, _, text) in zip(calls, prompts[1:], turns, strict=True):
        delta = following.token_ids[len(sent) + len(sampled) :].tolist()
        decoded = template.tokenizer.decode(delta)
        assert decoded.endswith(openings)
        if text.isalnum() and text.isascii():
            assert text in decoded


canonical = st.sampled_from(["ok", "The capital is Paris.", "A1", "naïve 🎲 你好", "a b\nc", "x" * 40])


@pytest.mark.parametrize("style", ["qwen", "llama3", "mistral"])
@given(answers=st.lists(canonical, min_size=1, max_size=4), observations=st.lists(canonical, min_size=4, max_size=4))
@SLOW_IS_FINE
def test_the_continuation_equals_a_fresh_rendering_when_the_text_survives(style: str, answers: Any, observations: Any):
    """Two ways to the same prompt: stored tokens plus delta, and rendering everything again."""
    tokenizer = make_tokenizer(style)
    template = HFChatTemplate(tokenizer)
    conversation = Conversation(template)
    messages = [{"role": "user", "content": "begin"}]
    for answer, observation in zip(answers, observations, strict=False):
        prompt = conversation.next_prompt(messages)
        assert prompt.token_ids.tolist() == template.apply(messages).prompt_token_ids.tolist()
        ids = [*_ids_in_place(template, messages, answer), tokenizer.eos_token_id]
        conversation.record(ids, answer)
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    assert conversation.next_prompt(messages).token_ids.tolist() == template.apply(messages).prompt_token_ids.tolist()


def _ids_in_place(template: HFChatTemplate, messages: Any, answer: str) -> list[int]:
    """The tokens a rendering uses for this answer at this place."""
    before = template.apply(messages).prompt_token_ids
    whole = template.apply([*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False)
    closing = template._encode_fragment(template._closing + template._at_the_end)
    return whole.prompt_token_ids[len(before) : -len(closing)].tolist()


def test_thinking_of_old_turns_stays_in_the_tokens_although_the_template_would_drop_it():
    tokenizer = make_tokenizer("qwen")
    template = HFChatTemplate(tokenizer)
    conversation = Conversation(template)
    messages = [{"role": "user", "content": "begin"}]
    conversation.next_prompt(messages)
    reply = "<think>secret</think>ok"
    conversation.record([*template._encode(reply).tolist(), tokenizer.eos_token_id], reply)
    messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
    assert "secret" in tokenizer.decode(conversation.next_prompt(messages).token_ids.tolist())
    assert "secret" not in template.apply(messages).prompt_text


def test_a_template_that_numbers_its_rounds_is_continued_with_the_right_number():
    tokenizer = make_tokenizer("rounds")
    template = HFChatTemplate(tokenizer)
    assert not template._tail_is_local
    conversation = Conversation(template)
    messages = [{"role": "user", "content": "q1"}]
    for number in range(2, 5):
        conversation.next_prompt(messages)
        conversation.record(template._encode(" yes").tolist(), " yes")
        messages = [*messages, {"role": "assistant", "content": " yes"}, {"role": "user", "content": f"q{number}"}]
    text = tokenizer.decode(conversation.next_prompt(messages).token_ids.tolist())
    assert (
        text == "[Round 1] Q: q1\nA: yes\n\n[Round 2] Q: q2\nA: yes\n\n[Round 3] Q: q3\nA: yes\n\n[Round 4] Q: q4\nA:"
    )


def test_the_closing_that_the_model_wrote_itself_is_not_repeated():
    """Without special tokens the overlap is found by comparing tokens."""
    template = HFChatTemplate(make_tokenizer("rounds"))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    written = template._encode("b\n\n")
    delta = template.delta(messages, num_sent=1, completion_token_ids=written)
    assert template.tokenizer.decode(delta.tolist()) == "[Round 2] Q: c\nA:"


def test_messages_that_do_not_extend_the_last_ones_start_a_new_segment():
    template = HFChatTemplate(make_tokenizer("qwen"))
    conversation = Conversation(template)
    first = [{"role": "user", "content": "a"}]
    conversation.next_prompt(first)
    conversation.record([40], "b")
    rewritten = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = conversation.next_prompt(rewritten)
    assert prompt.rewrote_history
    assert prompt.token_ids.tolist() == template.apply(rewritten).prompt_token_ids.tolist()


def test_changing_the_tools_starts_a_new_segment():
    conversation = Conversation(HFChatTemplate(make_tokenizer("qwen"), tool_parser=HermesToolParser()))
    conversation.next_prompt([{"role": "user", "content": "a"}], tools=TOOLS)
    conversation.record([40], "b")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert conversation.next_prompt(messages, tools=None).rewrote_history


def test_a_call_that_was_never_answered_is_rendered_afresh():
    conversation = Conversation(HFChatTemplate(make_tokenizer("qwen")))
    messages = [{"role": "user", "content": "a"}]
    first = conversation.next_prompt(messages)
    again = conversation.next_prompt(messages)
    assert first.token_ids.tolist() == again.token_ids.tolist() and not again.rewrote_history


def test_prompts_of_one_segment_share_their_memory():
    conversation = Conversation(HFChatTemplate(make_tokenizer("qwen")))
    messages = [{"role": "user", "content": "a " * 200}]
    views = []
    for _ in range(50):
        views.append(conversation.next_prompt(messages).token_ids)
        conversation.record([40, 41], "b")
        messages = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    buffers = {id(view.base): view.base.nbytes for view in views}
    assert sum(buffers.values()) < 8 * views[-1].nbytes  # quadratic storage would be about 25 times
    assert all(not view.flags.writeable for view in views)


LLAMA2_STYLE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GLM_STYLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<|endoftext|>' + m.content }}{% else %}{{ '<|im_end|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
"""No closing: the marker of the next role is the token a model stops with."""
LOOKS_UP_CALLS = (
    "{% set ns = namespace(ids=[]) %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}{% set ns.ids = ns.ids + [c.id] %}{% endfor %}"
    "{% if m.role == 'tool' %}<|im_start|>tool {{ ns.ids.index(m.tool_call_id) if m.tool_call_id in ns.ids else '?' }}"
    "\\n{{ m.content }}<|im_end|>\\n"
    "{% else %}<|im_start|>{{ m.role }}\\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)


def after(
    template: HFChatTemplate, completion: list[int], *new: dict[str, Any], reply: dict[str, Any] | None = None
) -> str:
    messages = [{"role": "user", "content": "a"}, reply or {"role": "assistant", "content": "b"}, *new]
    delta = template.delta(messages, num_sent=1, completion_token_ids=completion)
    assert delta is not None
    return template.tokenizer.decode(delta.tolist())


USER = {"role": "user", "content": "Go on"}


def test_a_closing_that_begins_with_a_space_is_not_written_behind_a_sampled_end():
    template = HFChatTemplate(with_template("mistral", LLAMA2_STYLE))
    eos = template.tokenizer.eos_token_id
    assert after(template, [40, eos], USER) == "<s>[INST] Go on [/INST]"
    assert after(template, [40], USER) == " </s><s>[INST] Go on [/INST]"


def test_without_a_closing_only_the_very_marker_that_was_sampled_is_left_out():
    template = HFChatTemplate(with_template("qwen", GLM_STYLE))
    ids = {t: template.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>", "<|im_start|>")}
    assert after(template, [40, ids["<|im_end|>"]], USER) == "Go on<|im_start|>"
    assert after(template, [40, ids["<|endoftext|>"]], USER) == "<|im_end|>Go on<|im_start|>"
    assert after(template, [40], USER) == "<|im_end|>Go on<|im_start|>"


def test_a_reply_cut_off_behind_another_special_token_is_still_closed():
    template = HFChatTemplate(make_tokenizer("qwen"))
    start = template.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert after(template, [40, start], USER).startswith("<|im_end|>\n<|im_start|>user")


def test_a_template_that_looks_up_the_call_finds_it():
    template = HFChatTemplate(with_template("qwen", LOOKS_UP_CALLS.replace("\\\\", "\\")))
    call = make_tool_call("calculator", {"x": "1"}, 0)
    reply = {"role": "assistant", "content": "b", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "name": "calculator", "content": "3"}
    eos = template.tokenizer.eos_token_id
    assert "<|im_start|>tool 0" in after(template, [40, eos], result, reply=reply)


def test_tools_are_written_once_even_by_a_template_that_puts_them_before_the_last_message():
    turns = [(([40], True), "user", "one"), (([41], True), "user", "two")]
    template, _, prompts = play("mistral", turns)
    assert template.tokenizer.decode(prompts[-1].token_ids.tolist()).count("[AVAILABLE_TOOLS]") == 1


def test_two_calls_at_once_can_be_rendered_afresh_where_the_template_allows_one():
    template = HFChatTemplate(make_tokenizer("llama3"))
    calls = [make_tool_call("calculator", {"x": str(n)}, n) for n in range(2)]
    text = template.apply(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": calls}]
    ).prompt_text
    assert text.count("<tool_call>") == 2


SEVERAL_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}"
    "{% if m.role == 'assistant' %}<|im_end|>response<|im_end|>message{% endif %}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""Kimi K3's way: a reply is closed by two marks with text behind them, and a token."""


def test_of_a_closing_with_several_special_tokens_only_what_is_missing_is_written():
    template = HFChatTemplate(with_template("qwen", SEVERAL_ENDS))
    closing = ["<|im_end|>", "response", "<|im_end|>", "message", "<|endoftext|>"]
    new = "<|im_start|>user:Go on<|endoftext|><|im_start|>assistant:"
    for written in range(len(closing) + 1):
        completion = template._encode("b" + "".join(closing[:written])).tolist()
        assert after(template, completion, USER) == "".join(closing[written:]) + new
    assert after(template, [40, template.tokenizer.convert_tokens_to_ids("<|endoftext|>")], USER) == new


GOES_THROUGH_TOOLS = (
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '>>>' ~ c.function.name ~ ' ' ~ c.function.arguments }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""Hermes' way with tools, which are always expected, and functionary's with arguments, which are expected to be text."""


def test_a_template_that_always_expects_tools_and_prints_arguments_gets_a_list_and_text():
    template = HFChatTemplate(with_template("qwen", GOES_THROUGH_TOOLS))
    messages = [{"role": "user", "content": "a"}]
    assert template.apply(messages).prompt_text == "<|im_start|>user:a<|im_end|><|im_start|>assistant:"
    call = make_tool_call("calculator", {"x": "it's"}, 0)
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = template.apply([*messages, reply], tools=TOOLS).prompt_text
    assert '>>>calculator {"x": "it\'s"}<|im_end|>' in text


def test_arguments_that_are_no_json_are_refused_in_a_sentence():
    call = make_tool_call("calculator", {}, 0)
    call["function"]["arguments"] = "{x"
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(TemplateError, match="calculator: arguments must be JSON text"):
        HFChatTemplate(make_tokenizer("qwen")).apply([{"role": "user", "content": "a"}, reply])
