"""Plain data as JSON: the only values that pass between a candidate program and its judge.

None, booleans, numbers, text, bytes, and lists, tuples, sets and dictionaries of them. They carry no code, so reading an answer of
a hostile program runs nothing. Any other object arrives as an `Opaque`, of which only the type and the truth value are known.

The text of this file also goes into the sandbox, before the programs in `inside/`: standard library only.
"""

from __future__ import annotations

from _json import encode_basestring_ascii

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` or `json` would take longer than most programs run
    from typing import Any

_BIG = 1024  # bits; Python refuses to write long integers in decimal


class Opaque:
    """A value that is not plain data. It equals nothing."""

    __slots__ = ("text", "truth")

    def __init__(self, text: str, truth: bool) -> None:
        self.text = text
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"<{self.text}>"


def dumps(value: Any) -> str:
    return to_json(encode(value))


def encode(value: Any) -> Any:
    """Lists stay lists; everything that JSON lacks becomes {kind: …}. Subclasses become their base."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _BIG else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Opaque):
        return {"object": [value.text, value.truth]}
    try:
        truth = bool(value)
    except Exception:  # noqa: BLE001 - an object of the candidate may raise anything
        truth = False
    return {"object": [type(value).__name__, truth]}


def decode(data: Any) -> Any:
    """The value that `encode` was given. ValueError, TypeError, LookupError or RecursionError for other data."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in content)
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "object":
        return Opaque(str(content[0]), bool(content[1]))
    raise ValueError(f"no plain data is called {kind!r}")


def to_json(data: Any) -> str:
    """JSON without importing `json`."""
    if data is None or data is True or data is False:
        return "null" if data is None else "true" if data else "false"
    if isinstance(data, str):
        return encode_basestring_ascii(data)
    if isinstance(data, float):
        names = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
        text = float.__repr__(data)
        return names.get(text, text)
    if isinstance(data, int):
        return int.__repr__(data)
    if isinstance(data, (list, tuple)):
        return "[" + ",".join([to_json(item) for item in data]) + "]"
    return "{" + ",".join([encode_basestring_ascii(key) + ":" + to_json(item) for key, item in data.items()]) + "}"


def from_literal(text: str) -> Any:
    """The data whose `ascii` is the text. It is evaluated, so only for text that Ludic wrote."""
    return eval(text, {"inf": float("inf"), "nan": float("nan")})


def shown(value: Any, limit: int = 200) -> str:
    """The value's repr, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of many thousand digits; lists in lists in lists
        text = f"<{type(value).__name__} too large to write>"
    return text if len(text) <= limit else text[:limit] + "…"
