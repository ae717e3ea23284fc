"""The table of columns: it names the fields of `SampleAttachments`, and each column is cut with its sample."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ludic.types import ActorTokenLogps, CandidateSets, Image, ImageSpan, MessageSpan, SampleAttachments, SAWItem
from ludic.types.columns import COLUMNS, NOTHING_SAMPLED, PER_TOKEN

PICTURE = Image.of(np.zeros((1, 1), dtype=np.uint8))
NUM_TOKENS = 8
ACTIONS = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)


def whole() -> SAWItem:
    """A sample with every column."""
    numbers = np.arange(5, dtype=np.float32)
    attached = SampleAttachments(
        **dict.fromkeys(PER_TOKEN, numbers),
        actor_logps=ActorTokenLogps(-numbers),
        temperature=0.5,
        candidates=CandidateSets.of([[2, 9], [], [5], [6, 7], []]),
        untrainable_sampling="top_p=0.9",
        version_runs=((3, 2), (4, 3)),
        images=(ImageSpan(PICTURE, 0, 1), ImageSpan(PICTURE, 4, 1)),
        experts=np.arange(2 * NUM_TOKENS).reshape(NUM_TOKENS, 1, 2),
        message_spans=(MessageSpan(0, "user", 0, 3, 1, 2), MessageSpan(1, "assistant", 3, 8, 3, 7)),
        observed_roles=("user",),
    )
    return SAWItem(range(NUM_TOKENS), None, ACTIONS, 1.0, attachments=attached)


def facts(item: SAWItem) -> list:
    """Everything that the sample holds, as values that can be compared."""
    attached = item.attachments
    values = [
        None if attached.actor_logps is None else attached.actor_logps.token_logps,
        *map(attached.__getattribute__, NAMES),
    ]
    arrays = [item.input_ids, item.attention_mask, item.action_mask, *values]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in arrays]


NAMES = [column.name for column in COLUMNS if column.name != "actor_logps"]
masks = st.lists(st.booleans(), min_size=NUM_TOKENS, max_size=NUM_TOKENS).map(np.array)


def test_every_attachment_is_a_column_and_its_default_is_nothing():
    assert {field.name: field.default for field in fields(SampleAttachments)} == {c.name: c.nothing for c in COLUMNS}


def test_the_sample_of_the_tests_has_every_column():
    assert all(getattr(whole().attachments, column.name) is not column.nothing for column in COLUMNS)


@given(masks, masks)
def test_a_part_of_a_part_is_the_part_of_both(first, second):
    assert facts(whole().only(first).only(second[first])) == facts(whole().only(first & second))


def test_a_sample_without_some_tokens_keeps_what_is_known_of_the_others():
    kept = np.array([0, 1, 1, 0, 1, 1, 1, 0], dtype=bool)
    part = whole().only(kept)
    own = part.attachments
    assert part.input_ids.tolist() == [1, 2, 4, 5, 6] and own.token_rewards.tolist() == [0, 2, 3]
    assert part.actor_logps.tolist() == [0, -2, -3] and own.experts[:, 0, 0].tolist() == [2, 4, 8, 10, 12]
    assert [own.candidates[i].tolist() for i in range(3)] == [[2, 9], [5], [6, 7]]
    assert own.version_runs == ((3, 1), (4, 2)) and own.images == (ImageSpan(PICTURE, 2, 1),)
    assert own.message_spans == (MessageSpan(0, "user", 0, 2, 0, 1), MessageSpan(1, "assistant", 2, 5, 2, 5))
    assert (own.temperature, own.observed_roles) == (0.5, ("user",))


def test_facts_of_sampled_tokens_are_forgotten_where_others_are_trained_on():
    assert NOTHING_SAMPLED.keys() == {
        *PER_TOKEN, "actor_logps", "candidates", "temperature", "untrainable_sampling", "version_runs",
    }  # fmt: skip
