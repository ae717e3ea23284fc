r"""Answers made from right ones: a permuted, shifted or otherwise changed answer earns nothing, another notation everything.

Sources are the references of MATH-500 and GSM8K, and words. Each change is one after which the answer is wrong (or right) for
sure, whatever the reference means: no other grader is asked.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from random import Random

import pytest

from ludic.envs.gsm8k import GSM8KEnv
from ludic.envs.math_grading import _number, is_equivalent
from tests.data import read_jsonl
from tests.fuzz import Fuzz

pytestmark = pytest.mark.slow

pytest.importorskip("math_verify", reason="the math extra is not installed")

WORDS = """
    no on yes one two six ten odd even east west north south true false left right red blue green monday friday evelyn navin
    circle ellipse parabola hyperbola line point triangle square prime composite never always sometimes increasing decreasing
    heads tails both neither none infinite undefined acute obtuse scalene isosceles
""".split()  # noqa: SIM905 - fifty words, one to a line
UNITS = ["cm", "inches", "feet", "dollars", "hours", "minutes", "degrees", "apples", "miles", "kg"]
Change = Callable[[str, Random], str | None]
"""A changed answer; None where the change does not apply."""


# --- references of known kinds ---


def some_number(rng: Random) -> str:
    return rng.choice(GSM8K if rng.random() < 0.5 else NUMBERS)


def some_tuple(rng: Random) -> str:
    items = rng.sample(
        ["1", "-2", "3", r"\frac{1}{2}", r"\sqrt{3}", "0", r"\pi", "x", "y+1", "-7.5", "12"], rng.randint(2, 4)
    )
    return f"({', '.join(items)})" if rng.random() < 0.7 or not TUPLES else rng.choice(TUPLES)


def some_list(rng: Random) -> str:
    return ", ".join(
        rng.sample(["1", "-2", "3", r"\frac{1}{2}", r"\sqrt{3}", "0", r"2\pi", "-7.5", "12"], rng.randint(2, 4))
    )


def some_word(rng: Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(WORDS)
    if kind == 1:
        return "".join(rng.choices(rng.choice(["TF", "HT", "ABCD", "PQR", "WXYZ", "LR"]), k=rng.randint(2, 5)))
    if kind == 2:
        return ", ".join(rng.sample("ABCDE", rng.randint(2, 4)))
    return ", ".join(rng.sample(WORDS, 2))


def some_expression(rng: Random) -> str:
    return rng.choice(EXPRESSIONS)


def some_points(rng: Random) -> str:
    name = "".join(rng.sample("ABCDEFG", rng.choice([2, 3, 4])))
    return rng.choice([r"\angle {}", r"\triangle {}", r"\overline{{{}}}", "2{} + 1"]).format(name)


# --- changes after which it is wrong ---


def another_order_of_digits(gold: str, rng: Random) -> str | None:
    places = [i for i, c in enumerate(gold) if c.isdigit()]
    a, b = rng.sample(places, 2) if len(places) > 1 else (0, 0)
    changed = list(gold)
    changed[a], changed[b] = changed[b], changed[a]
    return "".join(changed)


def another_sign(gold: str, rng: Random) -> str:
    return gold[1:] if gold.startswith("-") else f"-{gold}"


def one_more(gold: str, rng: Random) -> str:
    return f"{Fraction(str(_number(gold))) + rng.choice([1, -1, Fraction(1, 10), 10])}"


def ten_times(gold: str, rng: Random) -> str:
    return f"{gold}0" if gold.lstrip("-").isdigit() else f"{Fraction(str(_number(gold))) * 10}"


def shuffled_items(gold: str, rng: Random) -> str:
    opening, body, closing = ("(", gold[1:-1], ")") if gold.startswith("(") else ("", gold, "")
    items = re.split(r",\s*", body)
    a, b = rng.sample(range(len(items)), 2)
    items[a], items[b] = items[b], items[a]
    return f"{opening}{', '.join(items)}{closing}"


def as_set(gold: str, rng: Random) -> str:
    return rf"\{{{gold[1:-1]}\}}"


def one_item_less(gold: str, rng: Random) -> str:
    items = re.split(r",\s*", gold.strip("()"))
    return f"({', '.join(items[:-1])})" if gold.startswith("(") else ", ".join(items[:-1])


def one_item_twice(gold: str, rng: Random) -> str:
    items = re.split(r",\s*", gold)
    return ", ".join([*items, items[0]])


def anagram(gold: str, rng: Random) -> str:
    places = [i for i, c in enumerate(gold) if c.isalpha() and not re.search(r"\\[a-z]*$", gold[:i])]
    letters = [gold[i] for i in places]
    rng.shuffle(letters)
    changed = list(gold)
    for place, letter in zip(places, letters, strict=True):
        changed[place] = letter
    return rng.choice(["{}", r"\text{{{}}}"]).format("".join(changed)) if "\\" not in gold else "".join(changed)


def multiplied_letters(gold: str, rng: Random) -> str | None:
    changed = anagram(gold, rng)
    return r" \cdot ".join(changed) if changed.isalpha() and changed != gold else None


def another_word(gold: str, rng: Random) -> str | None:
    other = rng.choice(WORDS)
    return None if other in gold else other


def another_unit(gold: str, rng: Random) -> str:
    number, _, unit = gold.partition(" ")
    return f"{number} {rng.choice([u for u in UNITS if u != unit])}"


def something_added(gold: str, rng: Random) -> str:
    return rng.choice([r"{} + 1", r"2\left({}\right) + 3", r"1 - \left({}\right) + 10^{{6}}"]).format(gold)


# --- changes after which it is still right ---


def other_spaces(gold: str, rng: Random) -> str:
    return rng.choice([" {} ", "${}$", r"\( {} \)", "{}.", r"\,{}"]).format(
        re.sub(r",\s*", rng.choice([",", ", ", " , "]), gold)
    )


def as_fraction(gold: str, rng: Random) -> str:
    value, k = Fraction(str(_number(gold))), rng.randint(2, 5)
    return rng.choice(
        [
            rf"\frac{{{value.numerator * k}}}{{{value.denominator * k}}}",
            f"{value.numerator * k}/{value.denominator * k}",
        ]
    )


def with_unit(gold: str, rng: Random) -> str:
    return f"{gold} {rng.choice(UNITS)}"


def shuffled_numbers(gold: str, rng: Random) -> str:
    items = re.split(r",\s*", gold)
    rng.shuffle(items)
    return rng.choice([", ", " , "]).join(items) if rng.random() < 0.7 else f"{', '.join(items[:-1])} and {items[-1]}"


def marked_as_text(gold: str, rng: Random) -> str:
    return rng.choice([r"\text{{{}}}", r"\mathrm{{{}}}", r"\textbf{{{}}}"]).format(gold)


def nothing_added(gold: str, rng: Random) -> str:
    return rng.choice([r"\left({}\right) + 0", r"1 \cdot \left({}\right)", r"\frac{{2\left({}\right)}}{{2}}"]).format(
        gold
    )


# --- ---

MATH = [sample["answer"] for sample in read_jsonl("math500")]
GSM8K = sorted({GSM8KEnv(sample).target for sample in read_jsonl("gsm8k_test")})
NUMBERS = [gold for gold in MATH if (value := _number(gold)) is not None and value != 0]
TUPLES = [
    gold for gold in MATH
    if re.fullmatch(r"\((?:-?\d+(?:/\d+)?|\\frac\{\d+\}\{\d+\}),\s*(?:-?\d+|\\frac\{\d+\}\{\d+\})\)", gold)
]  # fmt: skip
EXPRESSIONS = [
    gold for gold in MATH
    if re.fullmatch(r"(?:\\(?:frac|sqrt|pi)|[-+{}0-9a-z^ ])+", gold) and re.search(r"(?<![\\a-z])[a-z]", gold) and _number(gold) is None
]  # fmt: skip

WRONG: list[tuple[Callable[[Random], str], list[Change]]] = [
    (some_number, [another_order_of_digits, another_sign, one_more, ten_times]),
    (lambda rng: f"{rng.randint(2, 99)} {rng.choice(UNITS)}", [another_unit]),
    (some_tuple, [shuffled_items, as_set, one_item_less]),
    (some_list, [one_item_less, one_item_twice]),
    (some_word, [anagram, anagram, multiplied_letters, another_word]),
    (some_points, [anagram]),
    (some_expression, [something_added]),
]
RIGHT: list[tuple[Callable[[Random], str], list[Change]]] = [
    (some_number, [other_spaces, as_fraction, with_unit]),
    (some_tuple, [other_spaces]),
    (some_list, [shuffled_numbers, other_spaces]),
    (some_word, [marked_as_text, other_spaces]),
    (some_expression, [other_spaces, nothing_added]),
]


def same_number(one: str, other: str) -> bool:
    return _number(one) is not None and _number(one) == _number(other)


def test_a_changed_answer_is_wrong_and_another_notation_right(fuzz: Fuzz):
    mistakes = []
    for case in range(fuzz.cases(250)):
        rng = fuzz.rng(case)
        is_right = rng.random() < 0.4
        make_gold, changes = rng.choice(RIGHT if is_right else WRONG)
        gold, change = make_gold(rng), rng.choice(changes)
        answer = change(gold, rng)
        if answer is None or (not is_right and (answer == gold or same_number(answer, gold))):
            continue  # two equal digits, letters or items were exchanged
        if not is_right and re.sub(r"\\text\{(.*)\}", r"\1", answer) == gold:
            continue
        if is_equivalent(answer, gold, timeout_s=60.0) != is_right:
            mistakes.append(
                f"{answer!r} for {gold!r} ({change.__name__}) is {'right' if is_right else 'wrong'}; {fuzz.at(case)}"
            )
    assert not mistakes, "\n".join(mistakes)
