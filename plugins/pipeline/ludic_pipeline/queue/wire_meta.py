"""An item's origin and meta on the wire, checked on both sides.

Origins travel as columns, one per field of `SampleOrigin` and typed as it is. A meta holds plain JSON values only: None,
flags, numbers, texts, lists and maps with text keys. Two things differ from JSON's text form: NaN and the infinities
survive, and an int has at most 64 bits. A tuple comes back as a list, an enum of texts as its text.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

import msgspec

from ludic.types import SampleOrigin
from ludic_pipeline.queue.wire_columns import UnreadableGroup, UnwritableGroup

# Origins: one column per field, left out where every item has the field's default.

MAX_NAME = 1024
"""Characters of a text in an origin: ids, names and the like."""

MAX_COMPONENTS = 64
"""Reward components of an item; each is a metric."""

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_TYPES: dict[Any, Any] = {
    str | None: _Name | None,
    dict[str, float] | None: Annotated[dict[_Name, float], msgspec.Meta(max_length=MAX_COMPONENTS)] | None,
}
_FIELDS = {field.name: field.default for field in fields(SampleOrigin)}
_facts_of = attrgetter(*_FIELDS)


def _column_type(name: str) -> Any:
    hint = get_type_hints(SampleOrigin)[name]
    value = _TYPES.get(hint, hint)
    return list[value] | None  # type: ignore[valid-type]


_encoder = msgspec.msgpack.Encoder()
_Columns = msgspec.defstruct("_Columns", [(name, _column_type(name), None) for name in _FIELDS], omit_defaults=True)
_origin_decoder = msgspec.msgpack.Decoder(_Columns)


def encode_origins(origins: Iterable[SampleOrigin]) -> bytes:
    columns = zip(*map(_facts_of, origins), strict=True)
    named = zip(_FIELDS.items(), columns, strict=True)
    told = {name: column for (name, default), column in named if column.count(default) < len(column)}
    try:
        return _encoder.encode(msgspec.convert(told, _Columns))
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
        raise UnwritableGroup(f"SampleOrigin of the items cannot be written: {error}. Convert it.") from None


def decode_origins(data: memoryview, num_items: int) -> dict[str, Sequence[Any]]:
    """A column per field of `SampleOrigin`."""
    try:
        columns = _origin_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableGroup(f"The origins of its items cannot be read: {error}.") from None
    found: dict[str, Sequence[Any]] = {}
    for name, default in _FIELDS.items():
        column = getattr(columns, name)
        if column is not None and len(column) != num_items:
            raise UnreadableGroup(f"There are {num_items} items, but {len(column)} of {name}.")
        found[name] = [default] * num_items if column is None else column
    return found


# Metas.

MAX_DEPTH = 32
"""Lists and maps inside one another. Readers of meta recurse; this keeps them far from Python's own limit."""

_SCALARS = frozenset({type(None), bool, int, float, str})
_TEXT = frozenset({str})
_CONTAINERS = (dict, list)

_decoder = msgspec.msgpack.Decoder(list[dict[str, Any]])


def encode_metas(metas: Sequence[Mapping[str, Any]]) -> bytes:
    with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
        # Nearly every meta is plain JSON and comes back equal: reading it again is faster than looking at each value.
        data = _encoder.encode(metas)
        if decode_metas(data) == metas:
            return data
    plain = [_plain(meta, ()) for meta in metas]
    try:
        return _encoder.encode(plain)
    except (OverflowError, UnicodeEncodeError):
        raise _culprit(plain) from None


def decode_metas(data: memoryview | bytes) -> list[dict[str, Any]]:
    try:
        metas = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableGroup(f"The meta of its items cannot be read: {error}.") from None
    for meta in metas:
        _check_values(meta.values(), 1)
    return metas


# --- before it is written ---


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    """The value as plain JSON."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, (Mapping, list, tuple)):
        if len(path) >= MAX_DEPTH:
            raise UnwritableGroup(
                f"{_named(path[:3])} goes deeper than {MAX_DEPTH} levels; flatten it or leave it out."
            )
        if isinstance(value, Mapping):
            return {_plain_key(key, path): _plain(inner, (*path, str(key))) for key, inner in value.items()}
        return [_plain(inner, (*path, str(index))) for index, inner in enumerate(value)]
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, a numpy float
            return kind.__str__(value) if kind is str else kind(value)
    raise UnwritableGroup(
        f"{_named(path)} is a {type(value).__name__}, but meta travels as JSON: None, bool, int, float, str, lists, and "
        "dicts with str keys. Convert it where it is put into meta, or leave it out."
    )


def _plain_key(key: Any, path: tuple[str, ...]) -> str:
    if not isinstance(key, str):
        raise UnwritableGroup(
            f"{_named(path)} has the key {key!r}, a {type(key).__name__}; meta travels as JSON, whose keys are str."
        )
    return str.__str__(key)


def _named(path: tuple[str, ...]) -> str:
    return "SAWItem.meta" + "".join(f"[{key!r}]" for key in path)


def _culprit(metas: list[dict[str, Any]]) -> UnwritableGroup:
    """Names the value that the encoder refused."""
    for key, value in ((key, value) for meta in metas for key, value in meta.items()):
        try:
            _encoder.encode({key: value})
        except (OverflowError, UnicodeEncodeError) as error:
            return UnwritableGroup(f"{_named((key,))} cannot be written: {error}. Convert it, or leave it out.")
    raise AssertionError("the metas were refused together, but none of their values alone")


# --- after it is read ---


def _check_values(values: Iterable[Any], depth: int) -> None:
    """Refuse what the decoder reads and JSON does not have: bytes, timestamps, extensions, maps with other keys."""
    for value in values:
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind not in _CONTAINERS:
            raise UnreadableGroup(f"The meta of an item holds a {kind.__name__}, which is not JSON.")
        if not value:
            continue
        if depth >= MAX_DEPTH:
            raise UnreadableGroup(f"The meta of an item goes deeper than {MAX_DEPTH} levels.")
        if kind is dict and not _TEXT.issuperset(map(type, value)):
            raise UnreadableGroup("The meta of an item has a map with keys that are not text.")
        _check_values(value.values() if kind is dict else value, depth + 1)
