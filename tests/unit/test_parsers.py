from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.parsers import (
    ParseResult,
    boxed_parser,
    compose_parsers,
    cot_prefix_parser,
    final_number_parser,
    pattern_parser,
    raw_parser,
    think_prefix_parser,
    xml_parser,
    xml_tag_parser,
)
from ludic.types import ConfigError


def test_first_tag_pair_is_the_action():
    parse = xml_tag_parser("move")
    assert parse("I think <move> A1 </move> or <move>B2</move>") == ParseResult("A1", 0.1, None)
    assert parse("<MOVE>a\nb</Move>").action == "a\nb"


@pytest.mark.parametrize(
    "text", ["", "A1", "<move></move>", "<move>  </move>", "<move>A1", "A1</move>", "<other>x</other>"]
)
def test_text_without_a_nonempty_pair_fails_with_feedback(text):
    result = xml_tag_parser("move")(text)
    assert result.action is None and result.reward == -1.0
    assert result.obs.startswith("Invalid action format:") and "<move>" in result.obs


def test_an_unclosed_tag_does_not_swallow_the_next_one():
    assert xml_tag_parser("move")("<move>no <move>A1</move>").action == "A1"


def test_exact_accepts_only_the_pair():
    parse = xml_tag_parser("move", exact=True)
    assert parse(" <move>A1</move>\n").action == "A1"
    assert parse("so <move>A1</move>").action is None
    assert parse("<move>A1</move> then").action is None


def test_two_tags_under_exact_are_a_failure():
    assert xml_tag_parser("move", exact=True)("<move>A1</move><move>B2</move>").action is None


def test_remainder_after_the_prefix_is_the_action():
    parse = xml_parser("plan", kind="remainder_after_prefix", success_reward=0.3)
    assert parse("<plan>x</plan> go") == ParseResult("go", 0.3, None)
    assert parse("go <plan>x</plan> on").action is None
    assert parse("<plan>x</plan>  ").action is None


def test_contradicting_settings_are_refused():
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


def test_raw_returns_the_text_unchanged():
    assert raw_parser(" x ") == ParseResult(" x ", 0.0, None)


def test_long_hostile_text_is_parsed_in_linear_time():
    hostile = "<move>" * 20_000
    assert xml_tag_parser("move")(hostile).action is None
    assert xml_tag_parser("move", exact=True)(hostile).action is None
    assert think_prefix_parser("<think>" * 20_000).action is None
    assert boxed_parser("\\boxed{" * 20_000).action is None


# --- the number that a reply ends on ---


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (r"2 + 2 = 4, so \boxed{4}. Checked 3 times.", "4"),
        (r"\boxed{1} no, \boxed{\$1,234.50}", r"\$1,234.50"),
        (r"\boxed{$1,234.50}", "1234.5"),
        (r"\boxed{-18.0}", "-18"),
        (r"\boxed{x = 5}", "x = 5"),
        (r"\boxed{5 million}", "5 million"),
        (r"\boxed{} #### 7", "7"),
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1\nno:\n#### $1,000.", "1000"),
        ("#### **-3**\nThat took 2 steps.", "-3"),
        ("#### 72 clips\nfor 3 friends", "72 clips"),
        ("#### 2. Add 5 and 6\nThe answer is 11.", "11"),
        ("#### Step 1\nThe answer is 11 apples", "11"),
        ("She pays $18.", "18"),
        ("She pays $18.00 on 3 days: $54.0", "54"),
        ("It costs 1,234,567.80 in all", "1234567.8"),
        ("That is 12,5 or so", "5"),
        ("It fell to -5.", "-5"),
        ("It fell to −$5", "-5"),
        ("a loss of $-5", "-5"),
        ("10-5", "5"),
        ("(3)-5", "5"),
        ("10 - 5=5", "5"),
        ("a half, or 1/2.", "1/2"),
        ("a half, or .50", "0.5"),
        ("It grew by 50%.", "50%"),
        ("The answer is...18", "18"),
        ("-0.0", "0"),
        ("007", "7"),
        ("She moved to B2 in version 1.2.3, at the age of 30", "30"),
    ],
)
def test_final_number_in_different_notations(text, action):
    assert final_number_parser(text) == ParseResult(action, 0.0, None)


@pytest.mark.parametrize("text", ["", "I do not know.", "B2", "####", r"\boxed{ }", "v1.2"])
def test_a_reply_without_a_number_fails_with_the_given_penalty(text):
    result = final_number_parser(text)
    assert result.action is None and result.reward == 0.0 and "expected a number" in result.obs
    strict = partial(final_number_parser, success_reward=0.2, error_reward=-0.5)
    assert strict(text).reward == -0.5 and strict("It is 4.").reward == 0.2


NUMBERS = st.decimals(min_value=-(10**9), max_value=10**9, places=2)
WORDS = st.text("abc xyz.,:;()=+\n", max_size=30)


@given(NUMBERS, WORDS, st.sampled_from(["{}", "{:,}", "{:f}"]), st.sampled_from(["", ".", " apples", "\n", "!"]))
def test_last_number_is_found_in_any_surrounding_text(number, before, spelling, after):
    text = f"{before}1 and 2: {spelling.format(number)}{after}"
    assert Fraction(final_number_parser(text).action) == Fraction(number)


@given(NUMBERS, WORDS, st.sampled_from([r"\boxed{%s}", "#### %s\n", r"#### 1" "\n" r"\boxed{%s}"]))
def test_a_marked_number_takes_precedence_over_later_ones(number, after, marked):
    text = f"First 3. {marked % f'{number:,}'}{after} 77 and 8"
    assert Fraction(final_number_parser(text).action) == Fraction(number)


@given(st.integers(0, 10**15), st.sampled_from(["{}", "{:,}", "{}.0", "${:,}.00", "0{}"]))
def test_equal_numbers_have_one_normal_form(number, spelling):
    assert final_number_parser(f"It is {spelling.format(number)}.").action == str(number)


def test_final_number_of_a_long_hostile_reply():
    assert final_number_parser("1," * 20_000).action == "1"
    assert len(final_number_parser("9" * 20_000).action) == 20_000
    assert final_number_parser("#### 5" + " " * 20_000 + "!\n" + "#" * 20_000).action == "5"
    assert final_number_parser("-" * 20_000 + "7" + " a" * 20_000).action == "-7"


# --- pattern ---


@pytest.mark.parametrize(
    ("reply", "action"),
    [("B2", "B2"), ("Not A1, I take c3.", "c3"), ("My move is [B1]", "B1"), ("hello", None), ("A12", None)],
)
def test_pattern_returns_the_last_match(reply, action):
    result = pattern_parser(r"\b[ABC][123]\b")(reply)
    assert result.action == action
    assert result.reward == (0.0 if action else -1.0)
    assert (result.obs is None) == (action is not None)


def test_pattern_with_a_group_returns_the_group():
    assert pattern_parser(r"move: (\w+)", success_reward=0.5)("Move: left, no, move: right") == ParseResult(
        "right", 0.5, None
    )


def test_an_invalid_pattern_is_refused():
    with pytest.raises(ConfigError, match="not a regular expression"):
        pattern_parser("[ABC")
