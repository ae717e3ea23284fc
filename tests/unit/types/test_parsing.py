"""Texts from outside: a ValueError for everything that cannot be read."""

import pytest

from ludic.util.files import parse_json, parse_toml

DEEP = 100_000


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, b"[" * DEEP, "[" * DEEP + "]" * DEEP])
def test_deep_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)


def test_deep_toml_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml("a = " + "[" * DEEP + "]" * DEEP)
