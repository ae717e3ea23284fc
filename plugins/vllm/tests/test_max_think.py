import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic_vllm.inside.max_think import forced_token, forced_tokens, read_limit

CLOSING = [7, 8, 7, 9]


def write(model_says, limit, closing=CLOSING):
    """The reply to which a model's tokens lead when the limit is kept."""
    reply = []
    for token in model_says:
        forced = forced_token(reply, limit, closing)
        reply.append(token if forced is None else forced)
    return reply


def test_the_tag_comes_exactly_at_the_limit():
    assert write([1] * 10, limit=3) == [1, 1, 1, *CLOSING, 1, 1, 1]


def test_a_reply_that_closed_in_time_is_unchanged():
    says = [1, *CLOSING, 2, 2, 2, 2, 2]
    assert write(says, limit=6) == says


@pytest.mark.parametrize("begun", [1, 2, 3])
def test_a_tag_that_the_model_began_is_finished(begun):
    says = [1, 1, *CLOSING[:begun], 5, 5, 5, 5, 5]
    written = write(says, limit=2 + begun)
    assert written[: 2 + len(CLOSING)] == [1, 1, *CLOSING]
    assert written[2 + len(CLOSING) :] == says[2 + len(CLOSING) :]


def test_a_repeated_beginning_counts_as_the_longest_that_fits():
    # the reply ends in 7 8 7: that is three tokens of the tag, not only the last one
    assert forced_token([7, 8, 7], 3, CLOSING) == 9


tokens = st.integers(5, 9)


@given(st.lists(tokens, max_size=30), st.integers(1, 20), st.lists(tokens, min_size=1, max_size=4))
@settings(max_examples=300)
def test_any_reply_has_the_tag_soon_after_the_limit(says, limit, closing):
    written = write(says, limit, closing)
    if len(written) >= limit + len(closing):
        text, tag = "".join(map(str, written[: limit + len(closing)])), "".join(map(str, closing))
        assert tag in text
    assert written[:limit] == says[:limit]


@given(
    st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=5),
    st.lists(tokens, min_size=1, max_size=4),
)
@settings(max_examples=200)
def test_on_a_device_the_same_tokens_are_forced(replies, closing):
    width = max(map(len, replies)) + len(closing)
    padded = torch.tensor(
        [[*reply, *closing, *[0] * width][:width] for reply in replies]
    )  # what follows must not count
    lengths = torch.tensor([len(reply) for reply in replies])
    forced = forced_tokens(padded, lengths, torch.tensor(closing)).tolist()
    one_by_one = [forced_token(reply, len(reply), closing) for reply in replies]
    assert forced == [-1 if token is None else token for token in one_by_one]


def test_a_request_without_a_limit_has_none():
    assert read_limit(None) is read_limit({}) is read_limit({"other": 1}) is None
    assert read_limit({"max_think": 12}) == 12


@pytest.mark.parametrize("limit", [0, -1, 1.5, "12", True])
def test_a_limit_that_is_no_number_of_tokens_is_refused(limit):
    with pytest.raises(ValueError, match="max_think is"):
        read_limit({"max_think": limit})
