"""220 answers beside their references, judged by hand: math_pairs.jsonl, one {kind, answer, gold, equivalent} a line."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ludic.envs.math_grading import is_equivalent

pytestmark = pytest.mark.slow

pytest.importorskip("math_verify", reason="the math extra is not installed")

PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_pairs.jsonl").read_text("utf-8").splitlines()]
KINDS = list(dict.fromkeys(pair["kind"] for pair in PAIRS))


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_graded_as_by_hand(kind):
    pairs = [pair for pair in PAIRS if pair["kind"] == kind]
    # Patient: a busy machine must not turn a slow parse into a wrong answer.
    graded = [{**pair, "equivalent": is_equivalent(pair["answer"], pair["gold"], timeout_s=60.0)} for pair in pairs]
    assert graded == pairs


def test_the_set_is_balanced_and_has_no_duplicates():
    assert Counter(pair["equivalent"] for pair in PAIRS) == {True: 110, False: 110}
    assert len({(pair["answer"], pair["gold"]) for pair in PAIRS}) == 220 and len(KINDS) >= 25
