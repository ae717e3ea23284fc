import copy
import threading
import time

import numpy as np
import pytest

from ludic.inference import ByteTemplate, HermesToolParser, HFChatTemplate
from ludic.inference.templates.conversation import decode_reply, encode_text
from ludic.inference.templates.hf import _RecentTexts
from ludic.types import TemplateError
from tests.chat_templates import NO_GENERATION_PROMPT, make_tokenizer, with_template

USER = {"role": "user", "content": "hi"}


def test_a_tokenizer_without_a_chat_template_is_refused_with_advice():
    with pytest.raises(TemplateError, match="no chat template"):
        HFChatTemplate(with_template("qwen", None))


def test_a_template_without_a_generation_prompt_is_refused_with_advice():
    with pytest.raises(TemplateError, match="add_generation_prompt.*assistant"):
        HFChatTemplate(with_template("qwen", NO_GENERATION_PROMPT))


def test_a_template_that_hides_replies_is_refused():
    with pytest.raises(TemplateError, match="does not show assistant"):
        HFChatTemplate(
            with_template(
                "qwen", "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
            )
        )


def test_a_refused_conversation_says_which_roles_and_why():
    template = HFChatTemplate(make_tokenizer("mistral"))
    with pytest.raises(TemplateError, match=r"\['user', 'user'\].*alternate"):
        template.apply([USER, USER])


def test_a_template_can_parse_tool_calls_only_with_a_parser():
    plain = HFChatTemplate(make_tokenizer("qwen"))
    assert not plain.supports_tools()
    text = '<tool_call>{"name":"f"}</tool_call>'
    assert plain.parse_tool_calls(text).tool_calls is None and plain.parse_tool_calls(text).content == text
    able = HFChatTemplate(make_tokenizer("qwen"), tool_parser=HermesToolParser())
    assert able.supports_tools() and able.parse_tool_calls(text).tool_calls


def test_stored_tool_arguments_are_not_encoded_twice():
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    text = HFChatTemplate(make_tokenizer("qwen")).apply(messages).prompt_text
    assert '"arguments": {"a": 1}}' in text


def test_a_template_that_cannot_continue_says_so():
    """Drops everything but the last message, so nothing can be said about what follows a reply."""
    source = "{{ messages[-1].role }}: {{ messages[-1].content }}{% if add_generation_prompt %}\nassistant: {% endif %}"
    template = HFChatTemplate(with_template("qwen", source))
    messages = [USER, {"role": "assistant", "content": "a"}, USER]
    assert template.delta(messages, num_sent=1, completion_token_ids=[40]) is None


def test_the_byte_template_is_exact_in_both_directions():
    template = ByteTemplate(tool_parser=HermesToolParser())
    result = template.apply([{"role": "system", "content": "sys"}, {"role": "user", "content": "é🎲"}])
    assert result.prompt_text == "<system>sys\n<user>é🎲\n<assistant>"
    assert template.decode_reply([*template.encode("é🎲"), ByteTemplate.END]) == "é🎲"
    assert template.supports_tools() and result.prompt_token_ids.dtype == np.int32
    with pytest.raises(TemplateError, match="narrator"):
        template.apply([{"role": "narrator", "content": ""}])


def test_the_byte_template_continues_as_it_renders():
    template = ByteTemplate()
    messages = [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    sent = template.apply(messages[:1]).prompt_token_ids
    for completion in ([*template.encode("a"), ByteTemplate.END], [*template.encode("a")]):
        delta = template.delta(messages, num_sent=1, completion_token_ids=np.array(completion, np.int32))
        whole = [*sent, *completion, *delta]
        assert whole == template.apply(messages).prompt_token_ids.tolist()


# --- the tokenizer without transformers' checks ---

TEXTS = ("", " leading", "two  spaces , and a comma", "naïve 日本 🎲\n", "<|im_start|>user\nhi<|im_end|>\n")


@pytest.mark.parametrize("name", ["qwen", "mistral", "llama3"])
def test_texts_and_replies_have_the_same_tokens_as_with_the_tokenizer_itself(name):
    tokenizer = make_tokenizer(name)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode_text(tokenizer, text).tolist() == ids
        assert decode_reply(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_settings_that_another_call_left_in_the_tokenizer_change_no_prompt():
    tokenizer = copy.deepcopy(make_tokenizer("qwen"))
    whole = encode_text(tokenizer, TEXTS[2]).tolist()
    assert len(tokenizer(TEXTS[2], truncation=True, max_length=3)["input_ids"]) == 3 < len(whole)
    assert encode_text(tokenizer, TEXTS[2]).tolist() == whole


def test_a_tokenizer_class_with_its_own_decoding_keeps_it():
    tokenizer = copy.deepcopy(make_tokenizer("qwen"))
    loud = type("Loud", (type(tokenizer),), {"decode": lambda self, ids, **_: "LOUD"})
    tokenizer.__class__ = loud
    assert decode_reply(tokenizer, [1, 2]) == "LOUD"


def test_recent_texts_are_bounded_by_their_characters(monkeypatch):
    monkeypatch.setattr(_RecentTexts, "MAX_CHARS", 10)
    monkeypatch.setattr(_RecentTexts, "ENTRY_CHARS", 0)
    encoded: list[str] = []
    tokens_of = _RecentTexts(lambda text: encoded.append(text) or np.zeros(len(text)))
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "bbbb", "aaaa", "x" * 11, "x" * 11, "dddd", "dddd"):
        assert len(tokens_of(text)) == len(text)
    assert encoded == ["aaaa", "bbbb", "cccc", "bbbb", "aaaa", "x" * 11, "x" * 11, "dddd"]


def test_long_texts_have_the_tokens_of_the_tokenizer():
    tokenizer = make_tokenizer("qwen")
    text = "What is é in 6 * 7?\n<|im_end|>  " * 1000
    assert encode_text(tokenizer, text).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_other_threads_run_while_a_long_text_is_tokenised():
    tokenizer, order = make_tokenizer("qwen"), []
    begun = threading.Event()

    def encode() -> None:
        begun.set()
        encode_text(tokenizer, "word and " * 40_000)
        order.append("long")

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    for _ in range(10):
        time.sleep(0.001)  # gives up Python's lock and wants it back
    order.append("other")
    thread.join()
    assert order == ["other", "long"]
