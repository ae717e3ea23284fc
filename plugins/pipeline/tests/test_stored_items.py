"""Samples in the checkpoints of replay and mixtures: what is written comes back, and so do samples of 0.2.0's checkpoints."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given

from ludic.batch_gen.sources.stored_items import item_as_text, item_of_text
from ludic.types import ConfigError, SAWItem
from ludic_pipeline.queue.wire import encode_group
from plugins.pipeline.tests.wire_items import as_constructed, facts, items


@given(items())
def test_a_stored_sample_comes_back_as_from_the_wire(item):
    text = item_as_text(item)
    assert json.loads(json.dumps(text)) == text
    assert facts(as_constructed(item_of_text(text))) == facts(as_constructed(item))


@given(items())
def test_a_sample_of_an_older_checkpoint_is_read(item):
    text = base64.b64encode(encode_group([item])).decode("ascii")
    assert facts(as_constructed(item_of_text(text))) == facts(as_constructed(item))


def test_a_sample_whose_meta_cannot_be_kept_is_refused():
    item = SAWItem(np.arange(2), None, np.array([False, True]), 1.0, meta={"what": object()})
    with pytest.raises(ConfigError, match="holds a object"):
        item_as_text(item)


def test_a_sample_of_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="the form 'WHAT', which no installed package reads"):
        item_of_text(base64.b64encode(b"WHAT is it").decode("ascii"))
