"""Samples as text, for sources whose checkpoints hold samples (replay and mixtures).

A sample is a msgpack map of its fields with arrays as bytes; nothing in it can be executed. Meta is kept as plain JSON: a tuple
comes back as a list, an enum of texts as its text. Checkpoints of 0.2.0 hold samples in another form, which its owner, a
plug-in with an entry point in `ludic.stored_items`, reads.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import msgspec
import numpy as np

from ludic.plugins import find
from ludic.types import (
    ActorTokenLogps,
    CandidateSets,
    ConfigError,
    Image,
    ImageSpan,
    MessageSpan,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    StopReason,
    VersionRun,
)

_MARK = b"LITM"
_SIZE = 4
"""Bytes of the mark that each stored sample begins with."""
_RECORDS = {
    kind.__name__: kind
    for kind in (SAWItem, SampleAttachments, SampleOrigin, ActorTokenLogps, CandidateSets, ImageSpan, Image)
}
_TUPLES: dict[str, Callable[..., Any]] = {
    "VersionRun": VersionRun,
    "MessageSpan": MessageSpan,
    "tuple": lambda *values: values,
}
_KIND = ""
"""Key of what a map stands for."""


def item_as_text(item: SAWItem) -> str:
    try:
        return base64.b64encode(_MARK + msgspec.msgpack.encode(_plain(item), enc_hook=_plain_value)).decode("ascii")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"A sample cannot be kept in a checkpoint: {error}. Its meta holds None, flags, numbers, texts, lists and maps."
        ) from error


def item_of_text(text: str) -> SAWItem:
    data = base64.b64decode(text)
    if data[:_SIZE] != _MARK:
        return _of_other_form(data)
    made: SAWItem = _made(msgspec.msgpack.decode(data[_SIZE:]))
    return made


def _of_other_form(data: bytes) -> SAWItem:
    form = data[:_SIZE].decode("ascii", "replace")
    reader = find("stored_items", form)
    if reader is None:
        raise ConfigError(f"A stored sample has the form {form!r}, which no installed package reads.")
    (item,) = reader.load()(data)
    found: SAWItem = item
    return found


def _plain(value: Any) -> Any:
    """The value as msgpack holds it, with its kind where it is no number or text."""
    if isinstance(value, np.ndarray):
        raw = np.packbits(value) if value.dtype == np.bool_ else np.ascontiguousarray(value)
        return {_KIND: "array", "type": value.dtype.str, "shape": value.shape, "data": raw.tobytes()}
    if is_dataclass(value):
        own = {field.name: getattr(value, field.name) for field in fields(value) if not _is_usual(value, field)}
        return {_KIND: type(value).__name__, **{name: _plain(inner) for name, inner in own.items()}}
    if isinstance(value, tuple):
        return {_KIND: type(value).__name__, "values": [_plain(inner) for inner in value]}
    if isinstance(value, Mapping):
        return {_KIND: "map", "value": dict(value)}
    return {_KIND: "stop", "value": value.value} if isinstance(value, StopReason) else value


def _is_usual(record: Any, field: Any) -> bool:
    """True if a field is left out: it has its default, or is the mask of a sample in which every token counts."""
    value = getattr(record, field.name)
    if field.name == "attention_mask":
        return bool(value.all())
    return field.default is not MISSING and type(value) is type(field.default) and bool(value == field.default)


def _plain_value(value: Any) -> Any:
    """A value inside meta that msgpack does not know."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


def _made(value: Any) -> Any:
    """Inverse of `_plain`."""
    if not isinstance(value, dict):
        return value
    kind = value.pop(_KIND)
    if kind == "array":
        return _array(value["type"], value["shape"], value["data"])
    if kind in _TUPLES:
        return _TUPLES[kind](*map(_made, value["values"]))
    if kind in ("map", "stop"):
        return StopReason(value["value"]) if kind == "stop" else value["value"]
    if kind == "SAWItem":
        value.setdefault("attention_mask", None)
    return _RECORDS[kind](**{name: _made(inner) for name, inner in value.items()})


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    if np.dtype(dtype) != np.bool_:
        return np.frombuffer(data, dtype).reshape(shape)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=int(np.prod(shape)))
    return bits.astype(np.bool_).reshape(shape)
