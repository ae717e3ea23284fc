"""Prompts with pictures: tokens of earlier turns stay as they are, and the tokens of each picture are known."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("PIL", reason="the vision extra is not installed")

from ludic.context import FullDialog, SlidingWindow, SummarisedDialog
from ludic.inference import Conversation, HFChatTemplate
from ludic.models.kinds import image_processor_of
from ludic.models.loading import character_tokenizer
from ludic.types import ChatResponse, TemplateError, content_of, images_in
from ludic.types.messages import joined, text_of
from ludic_envs.picture_grid import draw_grid
from ludic_gpu.tiny_vision import vision_tokenizer
from ludic_gpu.vision import Pictures, VisionTemplate, image_token

TOKENIZER = vision_tokenizer()
PICTURES = Pictures(image_processor_of(TOKENIZER))
IMAGE_ID = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")


def template() -> VisionTemplate:
    return VisionTemplate(TOKENIZER, image_token(TOKENIZER), PICTURES.num_tokens)


observations = st.one_of(
    st.sampled_from(["Go on.", "", "Wrong: it was 3."]),
    st.builds(
        lambda text, size, cell, twice: content_of(text, *[draw_grid(size, 8, cell)] * (1 + twice)),
        st.sampled_from(["Which?", ""]),
        st.integers(2, 4),
        st.integers(0, 3),
        st.booleans(),
    ),
)
replies = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=4)


def check_spans(prompt, messages) -> None:
    """The spans name the messages' pictures, in order, and every token in them is the placeholder."""
    assert [span.image for span in prompt.images] == images_in(messages)
    ends = [0]
    for span in prompt.images:
        assert span.start >= ends[-1] and span.length == PICTURES.num_tokens(span.image)
        assert (prompt.token_ids[span.start : span.end] == IMAGE_ID).all()
        ends.append(span.end)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(observations, replies), min_size=1, max_size=4))
def test_a_picture_per_turn_keeps_the_tokens_of_earlier_turns(turns):
    """Also where the model sampled placeholders itself, which stand for no picture."""
    conversation, messages = Conversation(template()), []
    before = np.empty(0, dtype=np.int32)
    spans: tuple = ()
    for obs, reply in turns:
        messages.append({"role": "user", "content": obs})
        prompt = conversation.next_prompt(list(messages))
        assert np.array_equal(prompt.token_ids[: len(before)], before)
        assert not prompt.is_new_segment
        check_spans(prompt, messages)
        assert prompt.images[: len(spans)] == spans
        spans = prompt.images
        text = TOKENIZER.decode(reply, skip_special_tokens=True)
        conversation.record(reply, text)
        messages.append({"role": "assistant", "content": text})
        before = np.concatenate([prompt.token_ids, np.array(reply, dtype=np.int32)])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(observations, min_size=4, max_size=5))
def test_a_context_that_drops_a_turn_starts_a_segment_with_the_pictures_that_are_left(shown):
    context, conversation = SlidingWindow("Look.", max_turns=2), Conversation(template())
    context.on_env_reset(shown[0], {})
    segments = 0
    for obs in [*shown[1:], None]:
        messages = context.on_before_act()
        prompt = conversation.next_prompt(messages)
        check_spans(prompt, messages)
        segments += prompt.is_new_segment
        conversation.record([5], "a")
        context.on_after_act(
            ChatResponse(text="a", prompt_token_ids=prompt.token_ids, completion_token_ids=np.array([5]))
        )
        if obs is not None:
            context.on_after_step(obs, {})
    assert segments == len(shown) - 2


def test_the_tokens_are_those_of_one_rendering_with_repeated_placeholders():
    small, large = draw_grid(2, 8, 1), draw_grid(3, 8, 4)
    rendered = template().apply([{"role": "user", "content": content_of("A", small, "B", large)}])
    marked = "<|vision_start|>{}<|vision_end|>"
    text = f"<|user|>A{marked.format('<|image_pad|>' * 4)}B{marked.format('<|image_pad|>' * 9)}<|end|><|assistant|>"
    assert rendered.prompt_text == text
    assert rendered.prompt_token_ids.tolist() == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert [(span.image, span.start, span.length) for span in rendered.images] == [(small, 3, 4), (large, 10, 9)]


def test_a_placeholder_in_a_text_stands_for_no_picture():
    """Neither in one part of a message nor across two, which the template writes one behind the other."""
    picture, vision = draw_grid(2, 8, 1), template()
    joined = [{"type": "text", "text": "<|image"}, {"type": "text", "text": "_pad|>"}]
    for texts in (content_of("<|image_pad|>"), joined):
        rendered = vision.apply([{"role": "user", "content": [*content_of("A", picture), *texts]}])
        assert rendered.prompt_text.count("<|image_pad|>") == 4 + 1
        assert [(span.image, span.length) for span in rendered.images] == [(picture, 4)]
        assert TOKENIZER.decode(rendered.prompt_token_ids.tolist()) == rendered.prompt_text


def test_a_model_of_text_says_that_it_takes_no_pictures():
    messages = [{"role": "user", "content": content_of("See", draw_grid(2, 8, 0))}]
    with pytest.raises(TemplateError, match="vision-language model"):
        HFChatTemplate(character_tokenizer()).apply(messages)
    only_text = HFChatTemplate(character_tokenizer()).apply([{"role": "user", "content": content_of("See")}])
    assert "See" in only_text.prompt_text


def test_notes_and_summaries_keep_pictures():
    picture = draw_grid(2, 8, 0)
    context = FullDialog()
    context.on_env_reset(content_of("See", picture), {})
    context.add_note("Answer now.")
    (message,) = context.on_before_act()
    assert images_in([message]) == [picture] and text_of(message["content"]).endswith("Answer now.")
    folded = SummarisedDialog()
    folded.on_env_reset(content_of("See", picture), {})
    folded.on_after_step("Unreadable.", {"parse_error": True})
    folded.fold("So far nothing.")
    (message,) = folded.on_before_act()
    assert images_in([message]) == [picture]
    assert joined(["a", "", "b"]) == "a\n\nb"
    assert json.loads(json.dumps(message)) == message
