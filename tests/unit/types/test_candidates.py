"""Candidate sets, and the sampling settings that a trainer cannot reproduce."""

import pickle

import numpy as np
import pytest

from ludic.types import (
    CandidateSets,
    SampleAttachments,
    SamplingParams,
    SAWItem,
    TokenTrace,
    untrainable_settings,
)


def listed(candidates):
    return [candidates[i].tolist() for i in range(len(candidates))]


def test_each_token_has_its_own_candidates():
    candidates = CandidateSets.of([[3, 1], [], [7]])
    assert listed(candidates) == [[3, 1], [], [7]] and candidates.lengths.tolist() == [2, 0, 1]
    assert listed(candidates.only(np.array([True, False, True]))) == [[3, 1], [7]]
    assert CandidateSets.from_dict(candidates.to_dict()) == candidates == pickle.loads(pickle.dumps(candidates))
    assert CandidateSets.of([[3, 1], [7], []]) != candidates
    assert not candidates.ids.flags.writeable and not candidates.ends.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "outside"), [([1, 9, 7], None), ([3, 9, 7], None), ([2, 9, 7], 0), ([1, 9, 3], 2), ([7, 9, 7], 0)]
)
def test_first_outside_finds_a_token_that_is_no_candidate(tokens, outside):
    assert CandidateSets.of([[3, 1], [], [7]]).first_outside(tokens) == outside


@pytest.mark.parametrize("ends", [[2, 1, 3], [1, 2], [-1, 3], [[3]], [4]])
def test_ends_that_do_not_fit_the_ids_are_refused(ends):
    with pytest.raises(ValueError, match="3 ids"):
        CandidateSets([1, 2, 3], ends)


def test_a_trace_needs_candidates_for_every_token_and_stores_them():
    trace = TokenTrace(
        [1], [2, 3], [-0.5, 0.0], candidates=CandidateSets.of([[2, 5], [3]]), untrainable_sampling="min_tokens=2"
    )
    assert TokenTrace.from_dict(trace.to_dict()) == trace
    assert TokenTrace.from_dict({**trace.to_dict(), "candidates": None}) != trace
    with pytest.raises(ValueError, match="2 completion tokens but 1 candidate sets"):
        TokenTrace([1], [2, 3], candidates=CandidateSets.of([[2, 5]]))


def test_an_item_needs_candidates_that_contain_every_action_token():
    def item(*lists):
        return SAWItem([1, 2, 3], None, [0, 1, 1], 1.0, {}, SampleAttachments(candidates=CandidateSets.of(lists)))

    assert len(item([2, 5], []).attachments.candidates) == 2
    with pytest.raises(ValueError, match=r"2 action tokens, but .*'candidates': 1"):
        item([2])
    with pytest.raises(ValueError, match="Action token 1 is not among"):
        item([2], [2])


@pytest.mark.parametrize(
    ("settings", "is_recorded", "expected"),
    [
        ({}, False, None),
        ({"temperature": 0.3, "stop": "x", "ignore_eos": True}, False, None),
        ({"top_p": 0.9, "top_k": 5}, False, "top_p=0.9, top_k=5"),
        ({"min_p": 0.1, "min_tokens": 2}, False, "min_p=0.1, min_tokens=2"),
        ({"top_p": 0.9, "min_tokens": 2}, True, None),
        ({"top_p": 0.9, "presence_penalty": 1.0}, True, "presence_penalty=1.0"),
        ({"temperature": 0.0, "top_p": 0.9}, False, None),  # the likeliest is never ruled out
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False, "repetition_penalty=1.1"),
    ],
)
def test_untrainable_settings_are_named(settings, is_recorded, expected):
    candidates = CandidateSets.of([[1]]) if is_recorded else None
    assert untrainable_settings(SamplingParams(**settings), None, candidates) == expected
