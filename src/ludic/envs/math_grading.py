r"""Compares a mathematical answer with the reference.

A right answer in an unusual notation may be refused, but a wrong one should never pass. Plain numbers, units, percentages and words
are read here, exactly and without any dependency; everything that takes algebra goes to math-verify in a worker process
(ludic.envs.math_worker).

    18.0 = 36/2 = $18     decimals, fractions, mixed numbers, 1,000, 1.8e1 and 18 million are exact fractions
    18 apples = 18        a unit may be missing on one side, but two different units never match
    50% = 0.5, 50% = 50   a percent sign may be missing too, where the bare number cannot be a share (above 1)
    0.333 ≠ 1/3           an approximation is not the number; 3.14159265358979 ≠ \pi, but \pi = 3.14159265358979 as a reference
    on ≠ no, BAC ≠ ABC    letters without an operator or a digit are a word, and never a product
    C, B ≠ B, C           a list of words has an order; one of numbers has none: 2, 1 = 1, 2

Known errors. Wrong answers that pass: 10:30 for 1:3, 52 for 52_8. Right answers that
fail: yx for xy, \angle CBA for \angle ABC, \sin 30^\circ, i^2 for -1, 1 000, \emptyset for "no solution", 18 quarters, five for 5.
"""

import asyncio
import re
import string
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Literal

from ludic.envs.math_worker import worker_of_this_process
from ludic.types import ConfigError

_WAITING = ThreadPoolExecutor(256, "ludic-grading")
"""Threads that wait for a worker. Slow questions would occupy all of asyncio's few threads."""
_PLAIN = re.compile(r"-?\d{1,18}", re.ASCII)
_MAX_CHARS = 2_000
"""Longer answers are compared as text only: parsing them would take minutes."""


def is_equivalent(answer: str, gold: str, *, timeout_s: float = 5.0) -> bool:
    """True if `answer` (a bare answer: number, words or LaTeX) means the same as the reference `gold`.

    Blocks for at most `timeout_s`; an answer that takes longer is not equivalent.
    """
    verdict = _verdict_without_algebra(answer, gold, timeout_s)
    if isinstance(verdict, bool):
        return verdict
    return worker_of_this_process().check(*verdict, timeout_s=timeout_s)


async def async_is_equivalent(answer: str, gold: str, *, timeout_s: float = 5.0) -> bool:
    """`is_equivalent` without blocking the event loop."""
    verdict = _verdict_without_algebra(answer, gold, timeout_s)
    if isinstance(verdict, bool):
        return verdict
    ask = partial(worker_of_this_process().check, *verdict, timeout_s=timeout_s)
    return await asyncio.get_running_loop().run_in_executor(_WAITING, ask)


def _verdict_without_algebra(answer: str, gold: str, timeout_s: float) -> bool | tuple[str, str]:
    """The verdict, or the pair of LaTeX texts that only algebra can compare."""
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s={timeout_s}, but math grading needs some time. Use the default of 5 seconds.")
    if _PLAIN.fullmatch(answer) and _PLAIN.fullmatch(gold):  # the usual case of word problems
        return int(answer) == int(gold)
    if not answer.strip() or max(len(answer), len(gold)) > _MAX_CHARS:
        return answer.strip() == gold.strip() != ""
    a, g = _read(answer), _read(gold)
    if a.unit != g.unit and ((a.unit and g.unit) or a.unit.startswith("base")):
        return False  # without a base the reference is decimal; a reference in base 8 may be answered by its digits
    if a.value is not None and g.value is not None:
        return _same_number(a, g)
    if a.body == g.body:
        return True
    if "base" in (a.unit[:4], g.unit[:4]):
        return False  # digits of another base are no algebra
    if a.is_text or g.is_text or max(map(len, g.words), default=0) > 1 or len(g.words) > 1:
        return _same_words(a, g)  # never as algebra: there, east and seat are the same product
    if not (_is_readable(a.body) and _is_readable(g.body)) or _factors_in_order(a.body) != _factors_in_order(g.body):
        return False
    # A decimal is that number exactly, and never \pi to so many places; a reference with decimals is an approximation itself.
    latex = a.latex if _WITH_POINT.search(g.body) else _WITH_POINT.sub(_as_fraction, a.latex)
    pair = _same_kind_of_list(latex, g.latex)
    return pair is not None and _keep_meaning(*pair)


# --- reading one side ---


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """One side of the comparison, read without algebra."""

    body: str
    """The normalised text without its unit."""
    unit: str
    """Canonical name ("cm", "foot^2", "%", "base 8"); empty when there is none."""
    value: Fraction | None
    """The exact number, if the body is one."""
    words: tuple[str, ...]
    """The items of the answer, if each is a word, a phrase or a letter; else empty."""
    is_text: bool
    r"""The words are marked with \text{…}."""

    @property
    def latex(self) -> str:
        return (self.body + self.unit if self.unit == "%" else self.body).replace("%", r"\%")


@lru_cache(maxsize=4096)  # the samples of a group share their reference, and often the answer
def _read(text: str) -> _Reading:
    body, unit = _split_unit(_spelled_out(_normalise(text)))
    wrapped = re.fullmatch(rf"{_TEXT}\{{([^{{}}]*)\}}", body)
    if wrapped:
        body = wrapped[1].strip()
    words = _words(body)
    return _Reading(
        body=body,
        unit=unit,
        value=_number(body) if body.isdigit() or not unit.startswith("base") else None,  # 1E3_{16} has another E
        words=words,
        is_text=bool(words) and (wrapped is not None or re.search(_TEXT, body) is not None),
    )


_TEXT = r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it)|mbox)\s*"
_WORD = re.compile(r"\(?\s*([A-Za-z]+(?:[' -][A-Za-z]+)*)\s*\)?")
_BETWEEN_ITEMS = re.compile(r"\s*[,;]\s*")
_SHORT_WORDS = frozenset("yes no odd all one two six ten".split())  # noqa: SIM905


def _words(body: str) -> tuple[str, ...]:
    """The items of `A, B and C`, if each consists of letters; `x y` is one word, xy."""
    plain = re.sub(r"\s+", " ", re.sub(rf"{_TEXT}\{{([^{{}}]*)\}}", r"\1", body)).strip()
    found = []
    for item in _BETWEEN_ITEMS.split(plain):
        word = _WORD.fullmatch(item)
        if word is None or ("-" in word[1] and max(map(len, re.split("[ -]", word[1]))) < 4):  # p-q is a difference
            return ()
        is_spaced = all(len(part) == 1 for part in word[1].split(" "))
        found.append(word[1].replace(" ", "") if is_spaced else word[1])
    return tuple(found)


def _same_words(a: _Reading, g: _Reading) -> bool:
    """The same words in the same order. Case matters where the words may be names of points or variables (AB, pq)."""
    words = a.words or _words(re.sub(r"\\(?:cdot|times)(?![A-Za-z])|\*", " ", a.body))  # x \cdot y may stand for xy
    if not words or len(words) != len(g.words):
        return False
    for one, other in zip(words, g.words, strict=True):
        if one.casefold() != other.casefold():
            return False
        is_word = a.is_text or g.is_text or len(one) > 3 or one.casefold() in _SHORT_WORDS
        if not (is_word or one == other or (len(one) > 1 and {one, other} == {one.lower(), one.capitalize()})):
            return False
    return True


def _same_number(a: _Reading, b: _Reading) -> bool:
    assert a.value is not None and b.value is not None, "both sides are numbers"
    if (a.unit == "%") == (b.unit == "%"):
        return a.value == b.value
    percent, plain = (a.value, b.value) if a.unit == "%" else (b.value, a.value)
    # "What percentage …?" is often answered by the bare number. Below 1 that would confuse 0.5 with half a percent.
    return percent / 100 == plain or (percent == plain and abs(plain) > 1)


def _is_readable(body: str) -> bool:
    r"""False where math-verify would guess: broken braces, and numbers side by side (it adds 18 19 up to 37)."""
    plain = re.sub(r"\\[{}]", "", body)
    depth = 0
    for brace in re.findall(r"[{}]", plain):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0 and not re.search(r"(?<![_^\d.])\d[\d.]*\s+[\d.]", plain)  # \log_2 8 is fine


_THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")


def _same_kind_of_list(a: str, b: str) -> tuple[str, str] | None:
    r"""The pair, if both may be the same kind of collection; a bare list compared with a tuple becomes one, since its order counts.

    math-verify takes (1,2) for \{1,2\} and for the list 2, 1, and leaves out repeated items.
    """
    kinds = [_kind_of_list(text) for text in (a, b)]
    if set(kinds) == {"set", "tuple"}:
        return None
    if set(kinds) == {"list", "tuple"}:
        return (f"({a})", b) if kinds[0] == "list" else (a, f"({b})")
    if kinds == ["list", "list"] and not any(r"\pm" in text or _THOUSANDS.search(text) for text in (a, b)):
        return (a, b) if len(_items(a)) == len(_items(b)) else None
    return a, b


def _kind_of_list(text: str) -> Literal["set", "tuple", "list", ""]:
    items = _items(text)
    if len(items) > 1:
        return "list" if not re.search(r"[=<>]|\\(?:[lg]e|in|cup|cap)\b", text) else ""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    return "tuple" if text.startswith("(") and text.endswith(")") and len(_items(text[1:-1])) > 1 else ""


def _items(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    items, depth, start = [], 0, 0
    for token in re.finditer(r"\\[{}]|\\begin|\\end|[][(){},;]", text):
        if token[0] in (r"\{", r"\begin", "(", "[", "{"):
            depth += 1
        elif token[0] in (r"\}", r"\end", ")", "]", "}"):
            depth -= 1
        elif depth == 0:
            items.append(text[start : token.start()])
            start = token.end()
    return [item for item in (*items, text[start:]) if item.strip()]


def _factors_in_order(body: str) -> list[list[str]]:
    r"""Vectors and matrices of each term, in their order: \vec{a} \times \vec{b} is not \vec{b} \times \vec{a}."""
    terms = [
        re.findall(r"\\(?:vec|mathbf|bm|boldsymbol|overrightarrow)\s*\{?\s*(\w+)", t) for t in re.split("[+-]", body)
    ]
    return sorted(filter(None, terms))


_COMMAND = r"\\(?:begin|end)\{\w+\}|\\[A-Za-z]+"


def _keep_meaning(a: str, b: str) -> tuple[str, str]:
    r"""Letters as math-verify reads them: it ignores case (R^2 - r^2 would be zero), and I is its imaginary unit."""
    a, b = _with_points(a), _with_points(b)
    plain = re.sub(_COMMAND, "", a + b)
    letters = set(plain) & set(string.ascii_letters)
    for upper in sorted(c for c in letters if c.isupper() and (c.lower() in letters or c == "I")):
        free = next((c for c in "zwvutsqpnmlkjhxyabcfgor" if not {c, c.upper()} & letters), upper)
        letters.add(free)
        a, b = _rename(a, upper, free), _rename(b, upper, free)
    if re.search(r"_\{?i", plain) is None:  # an index is no imaginary unit
        a, b = _rename(a, "i", "I"), _rename(b, "i", "I")
    return a, b


def _with_points(latex: str) -> str:
    """Capital letters side by side as one symbol: angle ABC is not angle BAC, and segment AB no product."""

    def symbol(points: re.Match[str]) -> str:
        return f"p_{{{int.from_bytes(points[0].encode())}}}"

    return _outside_commands(latex, lambda part: re.sub(r"(?<![A-Za-z])[A-Z]{2,}(?![A-Za-z])", symbol, part))


def _rename(latex: str, letter: str, to: str) -> str:
    return _outside_commands(latex, lambda part: part.replace(letter, to))


def _outside_commands(latex: str, change: Callable[[str], str]) -> str:
    parts = re.split(f"({_COMMAND})", latex)
    return "".join(part if part.startswith("\\") else change(part) for part in parts)


# --- notation ---

_SYMBOLS = str.maketrans(
    {
        "−": "-", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "∪": r"\cup ", "°": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ",
        **{c: " " + unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
        **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},  # full width
    }
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\\[(\[]\s*|\s*\\[)\]]$", ""),  # \( … \) and \[ … \] around everything
        (r"^(\$+)((?:\\\$|[^$])+)(?<!\\)\1$", r"\2"),
        (r"\\([$%])", r"\1"),
        (r"\\(?:left|right)(?![A-Za-z])|\\displaystyle(?![A-Za-z])", ""),
        (r",\\!\s*|\{,\}", ","),  # LaTeX for a thousands separator that is not set as punctuation
        (r"\\!", ""),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"√\s*(\d+|[A-Za-z])|√\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
        (r"(?:\s*,)?\s*\\(?:text|mbox)\s*\{\s*(?:and|or)\s*\}\s*|(?:\s*,)?\s+(?:and|or)\s+", ", "),
        (r"^=", ""),
        (r"\s+", " "),
        (r" ?([^\w\s.,\\}]) ?", r"\1"),  # not at a comma: 1, 000 is a list
        (r" ?\}(?: (?![A-Za-z]))?", "}"),  # in \frac{3}{2} apples the space begins a unit
        (r"\s*\.?\s*$", ""),
    )
]


def _normalise(text: str) -> str:
    text = text.translate(_SYMBOLS).strip()
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda raised: f"^{{{raised[0].translate(_RAISED)}}}", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)"  # 1,000 is a thousand; 1,2 and 0,123 are no numbers
_DECIMAL = rf"(?:(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,3}})?)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*
    (?:(?P<whole>\d+)\s*(?=\\frac|(?<=\s)\d+/))?           # of a mixed number: 1\frac{{1}}{{2}} or 1 1/2
    (?: \\frac\s*\{{\s*(?P<top>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}
      | (?P<upper>{_DECIMAL})(?:\s*/\s*(?P<lower>{_DECIMAL}))? )""",
    re.VERBOSE | re.ASCII,
)


_WITH_POINT = re.compile(rf"(?:{_INTEGER})?\.\d+(?![\deE]|\s*\\(?:overline|bar|%))", re.ASCII)


def _as_fraction(decimal: re.Match[str]) -> str:
    value = Fraction(decimal[0].replace(",", ""))
    fraction = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    # In braces only where they are needed: an equation with braces right after its sign is not read.
    return f"{{{fraction}}}" if decimal.string[: decimal.start()].endswith(("^", "_", r"\sqrt")) else fraction


_REPEATING = re.compile(r"(?P<sign>-?)(?P<fixed>\d+\.\d*)\\(?:overline|bar)\{(?P<cycle>\d+)\}", re.ASCII)
_SCALES = {"dozen": 12, "hundred": 100} | {
    name: 1000**power for power, name in enumerate(("thousand", "million", "billion", "trillion"), start=1)
}
_SCALED = re.compile(
    rf"(?P<before>-?[$€£¥₹]?)(?P<size>{_DECIMAL})\s*(?P<text>\\text\{{)?(?P<scale>{'|'.join(_SCALES)})s?(?![A-Za-z])\s*",
    re.ASCII,
)


def _spelled_out(text: str) -> str:
    """1.5 million dollars -> 1500000 dollars."""
    match = _SCALED.match(text)
    if match is None:
        return text
    value = Fraction(match["size"].replace(",", "")) * _SCALES[match["scale"]]
    rest = text[match.end() :]
    rest = rest.removeprefix("}") if rest == "}" else (match["text"] or "") + rest
    return f"{match['before']}{value} {rest}".strip()


def _number(text: str) -> Fraction | None:
    if repeating := _REPEATING.fullmatch(text):  # 0.1\overline{6} = 0.1 + 6/90
        fixed, cycle = repeating["fixed"], repeating["cycle"]
        num_decimals = len(fixed.partition(".")[2])
        value = Fraction(fixed) + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**num_decimals)
        return -value if repeating["sign"] else value
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    parts = (match["top"], match["bottom"]) if match["top"] else (match["upper"], match["lower"])
    top, bottom = (Fraction((part or "1").replace(",", "")) for part in parts)
    if bottom == 0:
        return None
    value = top / bottom
    if match["whole"]:
        if not 0 < value < 1:
            return None  # 2\frac{3}{2} is no mixed number
        value += int(match["whole"])
    return -value if match["sign"] == "-" else value


# --- units ---

_UNITS = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "inch inche in", "foot feet ft", "yard yd", "mile mi", "g gram", "kg kilogram", "pound lb", "ounce oz",
        "second sec s", "minute min", "hour hr h", "day", "week", "month", "year", "liter litre l",
        "ml milliliter millilitre", r"degree deg ^\circ ^{\circ}", "dollar usd $", "euro €", "cent ¢", "sterling £",
        "yen ¥", "rupee ₹",
        "% percent percentage", "mph", "unit", "per", "of",
    )
    for alias in names.split()
}  # fmt: skip
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_NOT_NOUNS = """
    hundred thousand million billion trillion lakh crore dozen score gross half halve third quarter fourth fifth
    sixth seventh eighth ninth tenth twelfth hundredth thousandth millionth zero one two three four five six seven
    eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty
    fifty sixty seventy eighty ninety plus minus times over out and not nor mod modulo base squared cubed factorial
    negative below under above less more than least most about between alpha beta gamma delta theta lambda sigma
    omega phi pi sqrt sin cos tan log exp inf infinity
"""
_NOT_UNITS = frozenset(_NOT_NOUNS.split())
"""Words that change the number they follow, or that begin another one."""
_TAIL = re.compile(
    rf"""(?P<body>.*(?:[\d.)}}]|\\pi\ ?))
    (?: \s*(?P<sign>\^\\circ|\^\{{\\circ\}}|[%$€£¢¥₹])
      | \s*{_TEXT}\{{(?P<text>[A-Za-z ./]+)\}}(?:\s*\^\{{?(?P<text_power>[23])\}}?)?
      | (?P<gap>\s*)(?P<bare>[A-Za-z]{{2}}[A-Za-z ./]*)(?:\^\{{?(?P<bare_power>[23])\}}?)? )""",
    re.VERBOSE,
)


def _split_unit(text: str) -> tuple[str, str]:
    """Body and canonical unit. A doubtful unit stays in the body: in 3m, m is a variable."""
    if based := re.fullmatch(r"(\d[\dA-Z]*)\s*_\s*\{?(\d+)\}?", text):
        return based[1], f"base {based[2]}"
    if priced := re.fullmatch(r"(-?)\s*([$€£¥₹])\s*(.+)", text):
        money, (body, rest) = _UNITS[priced[2]], _split_tail(priced[3])
        if rest == "%":
            return priced[1] + priced[3], money
        return priced[1] + body, money if rest in ("", money) else f"{money} {rest}"  # $5 dollars, $5 per hour
    return _split_tail(text)


def _split_tail(text: str) -> tuple[str, str]:
    tail = _TAIL.fullmatch(text)
    if tail is None:
        return text, ""
    body, is_number = tail["body"].strip(), _number(tail["body"].strip()) is not None
    if tail["sign"]:
        unit = _UNITS[tail["sign"]]
    elif tail["text"]:
        unit = _unit(tail["text"], tail["text_power"], any_noun=is_number)
    elif is_number and (tail["gap"] or tail["bare"].lower() in _UNITS):
        unit = _unit(tail["bare"], tail["bare_power"], any_noun=True)
    else:
        unit = ""
    if not unit or (unit == "%" and not is_number):
        return text, ""
    return body, unit


def _unit(phrase: str, power: str | None, *, any_noun: bool) -> str:
    """The canonical name, or "" if it may be no unit. After a plain number any noun is one: 18 apples."""
    words = phrase.replace("/", " per ").replace(".", " ").lower().split()
    suffix = f"^{power}" if power else ""
    if words and words[0] in _POWERS:
        suffix = _POWERS[words.pop(0)]
    singular = [word[:-1] if word.endswith("s") and len(word) > 2 else word for word in words]
    for word, stem in zip(words, singular, strict=True):
        is_noun = any_noun and len(word) > 2 and not {word, stem} & _NOT_UNITS
        if stem not in _UNITS and not is_noun:
            return ""
    return " ".join(_UNITS.get(stem, stem) for stem in singular) + suffix if words else ""
