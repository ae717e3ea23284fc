import json
import math
from collections import Counter, OrderedDict, namedtuple

import pytest

from ludic_sandbox.code_exec.plain_data import Opaque, decode, dumps, encode, from_literal, shown, to_json

VALUES = [
    None, True, 0, -3, 2**2000, -(2**2000), 1.5, float("inf"), float("-inf"), 3 + 4j, "tëxt\ud800\n\"", b"\x00\xff", [], [1, [2]],
    (), (1,), {1, 2}, frozenset({"a"}), {}, {1: [2], "dict": {"x": (None,)}}, {(1, 2): {3}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: shown(value, 30))
def test_plain_data_comes_back_as_it_went_with_its_types(value):
    again = decode(json.loads(dumps(value)))
    assert again == value and type(again) is type(value)
    assert decode(from_literal(ascii(encode(value)))) == value


def test_nan_is_encoded_and_decoded():
    assert math.isnan(decode(json.loads(dumps(float("nan")))))


def test_subclasses_are_encoded_as_their_base():
    class Sly(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    point = namedtuple("point", "x y")(1, 2)
    assert decode(encode([Counter("aab"), OrderedDict(a=1), point])) == [{"a": 2, "b": 1}, {"a": 1}, (1, 2)]
    assert decode(encode(Sly(3))) != 4


def test_anything_else_keeps_its_truth_value_and_equals_nothing():
    class Agreeable:
        def __eq__(self, other):
            return True

        __hash__ = None

    arrived = decode(json.loads(dumps(Agreeable())))
    assert isinstance(arrived, Opaque) and arrived and arrived != 1 and repr(arrived) == "<Agreeable>"
    assert not decode(encode(range(0)))
    assert decode(encode(arrived)).text == "Agreeable"


@pytest.mark.parametrize(
    "text",
    ['{"eval": "1"}', '{"a": 1, "b": 2}', "{}", '{"set": [[1]]}', '{"int": "zz"}', '{"bytes": "q"}', '{"dict": [1]}'],
)
def test_foreign_data_raises_an_expected_error(text):
    with pytest.raises((ValueError, TypeError, LookupError)):
        decode(json.loads(text))


def test_the_json_is_that_of_the_standard_library():
    data = {"a": [1, -2.5, None, True, False, 'ü"\\\n\x00'], "b": {"c": 1e300, "d": float("inf")}}
    assert json.loads(to_json(data)) == data


def test_a_number_of_many_digits_can_be_shown_without_writing_it_out():
    assert shown(10**20_000) == "<int too large to write>" and shown("a" * 500, 10) == "'aaaaaaaaa…"
