from functools import partial

import pytest

from ludic.parsers import (
    ParseResult,
    boxed_parser,
    compose_parsers,
    cot_prefix_parser,
    raw_parser,
    think_prefix_parser,
    xml_parser,
    xml_tag_parser,
)


def test_the_first_tag_pair_anywhere_is_the_action():
    parse = xml_tag_parser("move")
    assert parse("I think <move> A1 </move> or <move>B2</move>") == ParseResult("A1", 0.1, None)
    assert parse("<MOVE>a\nb</Move>").action == "a\nb"


@pytest.mark.parametrize(
    "text", ["", "A1", "<move></move>", "<move>  </move>", "<move>A1", "A1</move>", "<other>x</other>"]
)
def test_text_without_a_filled_pair_is_a_failure_with_feedback(text):
    result = xml_tag_parser("move")(text)
    assert result.action is None and result.reward == -1.0
    assert result.obs.startswith("Invalid action format:") and "<move>" in result.obs


def test_an_unclosed_tag_does_not_swallow_the_next_one():
    assert xml_tag_parser("move")("<move>no <move>A1</move>").action == "A1"


def test_exact_wants_the_pair_and_nothing_else():
    parse = xml_tag_parser("move", exact=True)
    assert parse(" <move>A1</move>\n").action == "A1"
    assert parse("so <move>A1</move>").action is None
    assert parse("<move>A1</move> then").action is None


def test_two_tags_under_exact_are_a_failure():
    assert xml_tag_parser("move", exact=True)("<move>A1</move><move>B2</move>").action is None


def test_the_remainder_after_a_prefix_is_the_action():
    parse = xml_parser("plan", kind="remainder_after_prefix", success_reward=0.3)
    assert parse("<plan>x</plan> go") == ParseResult("go", 0.3, None)
    assert parse("go <plan>x</plan> on").action is None
    assert parse("<plan>x</plan>  ").action is None


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="exact"):
        xml_parser("a", exact=True, kind="remainder_after_prefix")
    with pytest.raises(ValueError, match="unknown kind"):
        xml_parser("a", kind="outer")


def test_a_tag_with_regex_characters_is_taken_literally():
    assert xml_tag_parser("a.b")("<a.b>x</a.b>").action == "x"
    assert xml_tag_parser("a.b")("<acb>x</acb>").action is None


def test_think_prefix_is_called_directly():
    assert think_prefix_parser("<think>hm</think>A1") == ParseResult("A1", 0.1, None)
    assert think_prefix_parser("A1").reward == -1.0
    assert cot_prefix_parser is think_prefix_parser
    assert partial(think_prefix_parser, success_reward=0.0)("<think></think>A1").reward == 0.0


def test_boxed_reads_the_last_group():
    assert boxed_parser(r"\boxed{1} then \boxed{\frac{1}{2}}").action == r"\frac{1}{2}"
    failed = boxed_parser("the answer is 4")
    assert failed.action is None and failed.reward == -1.0 and "boxed" in failed.obs
    assert boxed_parser(r"\boxed{ }").action is None


def test_composed_parsers_pass_the_action_on_and_add_rewards():
    parse = compose_parsers(think_prefix_parser, xml_tag_parser("move"))
    result = parse("<think>hm</think><move>A1</move>")
    assert result.action == "A1" and result.reward == pytest.approx(0.2)


def test_the_first_failure_of_a_composition_keeps_the_sum_so_far():
    parse = compose_parsers(think_prefix_parser, xml_tag_parser("move"))
    result = parse("<think>hm</think>A1")
    assert result.action is None and result.reward == pytest.approx(0.1 - 1.0) and "<move>" in result.obs
    assert parse("A1").reward == pytest.approx(-1.0)


def test_an_empty_composition_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        compose_parsers()


def test_raw_takes_the_text_as_it_is():
    assert raw_parser(" x ") == ParseResult(" x ", 0.0, None)


def test_long_hostile_text_is_read_in_linear_time():
    hostile = "<move>" * 20_000
    assert xml_tag_parser("move")(hostile).action is None
    assert xml_tag_parser("move", exact=True)(hostile).action is None
    assert think_prefix_parser("<think>" * 20_000).action is None
    assert boxed_parser("\\boxed{" * 20_000).action is None
