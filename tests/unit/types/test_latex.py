import time

import pytest

from ludic.types.messages import extract_last_boxed_content


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} \fbox{7}", "7"),
        (r"\boxed {3}", "3"),
        ("\\boxed{ 3 \n}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"\boxed{2 \boxed{1}", "1"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"} \boxed{5} {", "5"),
        (r"\\boxed{5}", "5"),
        (r"x \\\boxed{5}", "5"),
        (r"\begin{align} x &= 1 \\ &= \boxed{p - q}. \end{align}", "p - q"),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_well_formed_box_is_read(raw, content):
    assert extract_last_boxed_content(raw) == content


@pytest.mark.parametrize("raw", ["", "42", r"\boxed", r"\boxed{", r"\boxed{{5}", r"boxed{5}", r"\boxed\{5\}", "{5}"])
def test_no_well_formed_box_gives_none(raw):
    assert extract_last_boxed_content(raw) is None


@pytest.mark.parametrize("unit", [r"\boxed{", r"\boxed{5}", "\\", "{", "\\boxed  "])
def test_a_hostile_reply_takes_linear_time(unit):
    start = time.process_time()
    extract_last_boxed_content(unit * 20_000)
    assert time.process_time() - start < 2
