"""Samples in the checkpoints of replay and mixtures: what is written comes back, and so do samples of 0.2.0's checkpoints."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given

from ludic.batch_gen.sources.mixed import item_as_text, item_of_text
from ludic.types import (
    ActorTokenLogps,
    CandidateSets,
    ConfigError,
    Image,
    ImageSpan,
    MessageSpan,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    StopReason,
)
from plugins.pipeline.tests.wire_items import as_constructed, facts, items


@given(items())
def test_a_stored_sample_comes_back_as_from_the_wire(item):
    text = item_as_text(item)
    assert json.loads(json.dumps(text)) == text
    assert facts(as_constructed(item_of_text(text))) == facts(as_constructed(item))


OF_0_2_0 = (
    "TEdSUAIBBt4AFKdsZW5ndGhzxAQFAAAAo2lkc8QKBQAGAAcACAAJAKhpZF9ieXRlcwKrYWN0aW9uX3J1bnPEEAIAAAABAAAAAQAAAAEAAACnd2"
    "VpZ2h0c8QIAAAAAAAA4D+lbWV0YXPECZGBpHRhc2uhdKdvcmlnaW5zxDPeAAOqcm9sbG91dF9pZJGhcqZyZXdhcmSRyz/wAAAAAAAApHN0b3CR"
    "qnRlcm1pbmF0ZWSuYXR0ZW50aW9uX3J1bnPECAEAAAAEAAAAq2FjdG9yX2xvZ3BzgaZ2YWx1ZXPECAAAAL8AAIC+rXRva2VuX3Jld2FyZHOBpn"
    "ZhbHVlc8QIAAAAAAAAgD+rdG9rZW5fdHVybnOBpnZhbHVlc8QIAAAAAAAAgD+sdGVtcGVyYXR1cmVzxAgAAAAAAADgP6pjYW5kaWRhdGVzgqNp"
    "ZHPECAcAAAADAAAAp2xlbmd0aHPECAIAAAAAAAAAtHVudHJhaW5hYmxlX3NhbXBsaW5nkal0b3BfcD0wLjmnZXhwZXJ0c4OmdmFsdWVzxCgAAA"
    "EAAgADAAQABQAGAAcACAAJAAoACwAMAA0ADgAPABAAEQASABMAqm51bV9sYXllcnMCqm51bV9jaG9zZW4CqnJ1bl9jb3VudHPEBAIAAACscnVu"
    "X3ZlcnNpb25zxBADAAAAAAAAAAQAAAAAAAAAq3J1bl9sZW5ndGhzxAgBAAAAAQAAAKZpbWFnZXOCpWZpbGVzkcRDiVBORw0KGgoAAAANSUhEUg"
    "AAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggqVzcGFuc5GRkwABAa1tZXNzYWdlX3NwYW5zkZKWAKR1"
    "c2VyAAIBApYBqWFzc2lzdGFudAIFAgU="
)
"""The sample below, as 0.2.0 wrote it into a checkpoint."""


def test_a_sample_of_an_older_checkpoint_is_read():
    item = SAWItem(
        [5, 6, 7, 8, 9],
        [0, 1, 1, 1, 1],
        [0, 0, 1, 0, 1],
        0.5,
        {"task": "t"},
        SampleAttachments(
            actor_logps=ActorTokenLogps([-0.5, -0.25]),
            token_rewards=[0, 1],
            token_turns=[0, 1],
            temperature=0.5,
            candidates=CandidateSets.of([[7, 3], []]),
            untrainable_sampling="top_p=0.9",
            version_runs=((3, 1), (4, 1)),
            images=(ImageSpan(Image.of(np.zeros((1, 1), np.uint8)), 1, 1),),
            experts=np.arange(20, dtype=np.int16).reshape(5, 2, 2),
            message_spans=(MessageSpan(0, "user", 0, 2, 1, 2), MessageSpan(1, "assistant", 2, 5, 2, 5)),
        ),
        SampleOrigin(rollout_id="r", stop=StopReason.TERMINATED, reward=1.0),
    )
    assert facts(as_constructed(item_of_text(OF_0_2_0))) == facts(as_constructed(item))


def test_a_sample_whose_meta_cannot_be_kept_is_refused():
    item = SAWItem(np.arange(2), None, np.array([False, True]), 1.0, meta={"what": object()})
    with pytest.raises(ConfigError, match="holds a object"):
        item_as_text(item)


def test_a_sample_of_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="the form 'WHAT', which no installed package reads"):
        item_of_text(base64.b64encode(b"WHAT is it").decode("ascii"))
