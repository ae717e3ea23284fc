"""The wire format of experience: a group of items as bytes, and back. Nothing in a message can be executed.

A message is a header (mark, major and minor version, flags) and a msgpack map whose values are raw arrays, one per field for all
items of the group together. A reader ignores unknown fields of a newer minor version; a change that an older reader would
misunderstand raises the major version.

    encode_group    items -> bytes; refuses items that would not come back the same
    decode_group    bytes -> items; any bytes give valid items or UnreadableGroup
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ludic.types import MissingExtra, SampleAttachments, SampleOrigin, SAWItem, TokenArray
from ludic.types.errors import how_to_install
from ludic_pipeline.queue.wire_columns import (
    I4,
    U2,
    BoolArray,
    GroupColumns,
    GroupSizes,
    UnreadableGroup,
    UnwritableGroup,
    WireLimits,
    decode_columns,
    decode_mask,
    encode_columns,
    encode_mask,
    packed,
    raw,
    read,
    too_large,
    unpacked,
)
from ludic_pipeline.queue.wire_meta import decode_metas, decode_origins, encode_metas, encode_origins

__all__ = [
    "UnreadableGroup",
    "UnwritableGroup",
    "WireLimits",
    "decode_group",
    "encode_group",
    "group_facts",
]

MAJOR, MINOR = 3, 0

_MARK = b"LGRP"
_HEADER = struct.Struct("<4sBBB")
_ZSTD = 1
"""A flag: the body is a zstd frame."""
_LIMITS = WireLimits()


class _GroupFacts(NamedTuple):
    """Facts of a group that the queue stores with the payload."""

    num_items: int
    oldest_version: int | None
    """Oldest version of any token of any item; None if unknown."""


def group_facts(items: Sequence[SAWItem]) -> _GroupFacts:
    versions = [version for item in items if (version := item.oldest_version) is not None]
    return _GroupFacts(len(items), min(versions, default=None))


class _Group(msgspec.Struct, gc=False, omit_defaults=True):
    """The body. "Per token" arrays hold the tokens of all items one after the other, split by `lengths`."""

    lengths: memoryview
    """Tokens of each item, uint32."""
    ids: memoryview
    """Per token: uint16 where all ids fit, else int32."""
    id_bytes: int
    """2 or 4."""
    action_runs: memoryview
    """The action mask, per token, as runs."""
    weights: memoryview
    """float64 per item."""
    metas: memoryview
    origins: memoryview
    """Columns of `SampleOrigin`."""
    columns: GroupColumns  # type: ignore[valid-type]
    """Columns of `SampleAttachments`."""
    attention_runs: memoryview | None = None
    """None: every token counts."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Group)


# --- writing ---


def encode_group(items: Sequence[SAWItem], *, compress: bool = False, limits: WireLimits = _LIMITS) -> bytes:
    """The group as bytes; UnwritableGroup names the item or key that cannot be written.

    `limits` are those of the learner: a group that it would move to the dead letters is refused here, where the cause is known.
    """
    _check_size(items, limits)
    group = _Group(
        **_token_fields(items, limits),
        weights=packed([item.weight for item in items], "d"),
        metas=memoryview(encode_metas([item.meta for item in items])),
        origins=memoryview(encode_origins(item.origin for item in items)),
        columns=encode_columns(lambda name: [getattr(item.attachments, name) for item in items], limits),
    )
    if (size := len(group.metas) + len(group.origins)) > limits.max_meta_bytes:
        raise too_large("bytes of meta", size, limits.max_meta_bytes, "Put less into meta.")
    body = _encoder.encode(group)
    message = _HEADER.pack(_MARK, MAJOR, MINOR, _ZSTD * compress) + (_compressed(body) if compress else body)
    size = max(len(message), len(body))
    if size > limits.max_bytes:
        raise too_large("bytes", size, limits.max_bytes, "Use smaller groups, or raise WireLimits.max_bytes.")
    return message


def _check_size(items: Sequence[SAWItem], limits: WireLimits) -> None:
    if not items:
        raise UnwritableGroup("A group holds at least one item, but this one has none. Do not push it.")
    if len(items) > limits.max_items:
        raise too_large("items", len(items), limits.max_items, "Use smaller groups, or raise WireLimits.max_items.")
    longest = max(len(item.input_ids) for item in items)
    if longest > limits.max_tokens:
        raise too_large("tokens in one item", longest, limits.max_tokens, "Raise WireLimits.max_tokens on both sides.")


def _token_fields(items: Sequence[SAWItem], limits: WireLimits) -> dict[str, Any]:
    ids = np.concatenate([item.input_ids for item in items])
    largest = _largest(ids)
    if largest >= limits.end_of_ids:
        raise UnwritableGroup(
            f"input_ids go from {ids.min()} to {ids.max()}; a learner reads 0 to {limits.end_of_ids - 1}."
        )
    fits = largest <= 0xFFFF
    attention = np.concatenate([item.attention_mask for item in items])
    return {
        "lengths": packed([len(item.input_ids) for item in items], "I"),
        "ids": raw(ids, U2 if fits else I4),
        "id_bytes": 2 if fits else 4,
        "action_runs": encode_mask(np.concatenate([item.action_mask for item in items])),
        "attention_runs": None if attention.all() else encode_mask(attention),
    }


def _largest(ids: TokenArray) -> int:
    """The largest id as unsigned: a negative id becomes very large, so one check finds both."""
    return int(ids.view(np.uint32).max(initial=0))


def _compressed(body: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("pipeline", "Compressing groups with zstd") from None
    return zstandard.ZstdCompressor().compress(body)


# --- reading ---


def decode_group(data: bytes, limits: WireLimits = _LIMITS) -> list[SAWItem]:
    """The items of a group, or UnreadableGroup; memory stays within a small multiple of `limits.max_bytes`."""
    body = _body(data, limits)
    try:
        group = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableGroup(f"The body of the group cannot be read: {error}.") from None
    return _items(group, limits)


def decode_stored(data: bytes) -> list[SAWItem]:
    """The items in a checkpoint of 0.2.0, written in format 2: its columns were fields of the body."""
    if data[4] != 2:
        return decode_group(data)
    old = msgspec.msgpack.decode(
        _body(_HEADER.pack(_MARK, MAJOR, MINOR, data[6] & _ZSTD) + data[_HEADER.size :], _LIMITS)
    )
    columns = {name: old[name] for name in GroupColumns.__struct_fields__ if name in old}
    if (temperatures := old.get("temperatures")) is not None:
        values = np.frombuffer(temperatures, dtype="<f8").tolist()
        columns["temperature"] = [None if math.isnan(value) else value for value in values]
    if (experts := old.get("experts")) is not None:
        experts["shape"] = [experts["num_layers"], experts["num_chosen"]]
    if "run_counts" in old:
        columns["version_runs"] = {name: old[f"run_{name}"] for name in ("counts", "versions", "lengths")}
    return _items(_decoder.decode(_encoder.encode({**old, "columns": columns})), _LIMITS)


def _body(data: bytes, limits: WireLimits) -> bytes | memoryview:
    if len(data) > limits.max_bytes:
        raise UnreadableGroup(f"The group has {len(data)} bytes; the limit is {limits.max_bytes}.")
    if len(data) < _HEADER.size or not data.startswith(_MARK):
        raise UnreadableGroup(
            f"{len(data)} bytes that do not begin like a group; did another program write to this queue?"
        )
    _, major, minor, flags = _HEADER.unpack_from(data)
    if major != MAJOR:
        who = "learner" if major > MAJOR else "actor"
        raise UnreadableGroup(
            f"The group was written in wire format {major}.{minor}, but this ludic reads {MAJOR}.x. Update ludic on the "
            f"{who}, and let actors and learners run the same version."
        )
    if flags & ~_ZSTD:
        raise UnreadableGroup(
            f"The group has the flags {flags:#x}, of which this ludic knows {_ZSTD:#x}. Update ludic."
        )
    body = memoryview(data)[_HEADER.size :]
    return _decompressed(body, limits) if flags & _ZSTD else body


def _decompressed(body: memoryview, limits: WireLimits) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise UnreadableGroup(
            f"The group is compressed with zstd, which is not installed here. {how_to_install('pipeline')} Or let the actors "
            "push uncompressed groups."
        ) from None
    try:
        # The library allocates the size that the frame declares, so check that size first.
        size = zstandard.get_frame_parameters(body).content_size
        if size > limits.max_bytes:
            raise UnreadableGroup(f"The group unpacks to {size} bytes; the limit is {limits.max_bytes}.")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise UnreadableGroup(f"The group cannot be unpacked: {error}.") from None


def _items(group: _Group, limits: WireLimits) -> list[SAWItem]:
    bounds = [0, *accumulate(_lengths(group, limits))]
    total = bounds[-1]
    ids = _ids(group, total, limits)
    action = decode_mask(group.action_runs, total, "action_runs")
    attention = _attention(group, total)
    spans = [slice(start, end) for start, end in pairwise(bounds)]
    counts = [int(np.count_nonzero(action[span])) for span in spans]
    sizes = GroupSizes([end - start for start, end in pairwise(bounds)], counts, lambda: ids[action], limits)
    return _made(
        SAWItem,
        input_ids=[ids[span] for span in spans],
        attention_mask=[attention[span] for span in spans],
        action_mask=[action[span] for span in spans],
        weight=_weights(group, len(spans)),
        meta=_metas(group, limits, len(spans)),
        attachments=_made(SampleAttachments, **decode_columns(group.columns, sizes)),
        origin=_made(SampleOrigin, **decode_origins(group.origins, len(spans))),
    )


def _lengths(group: _Group, limits: WireLimits) -> Sequence[int]:
    num_items = len(group.lengths) // 4
    if not 1 <= num_items <= limits.max_items:
        raise UnreadableGroup(f"The group has {num_items} items; 1 to {limits.max_items} are read.")
    lengths = unpacked(group.lengths, "I", num_items, "lengths")
    if max(lengths) > limits.max_tokens:
        raise UnreadableGroup(f"An item has {max(lengths)} tokens; the limit is {limits.max_tokens}.")
    return lengths


def _ids(group: _Group, total: int, limits: WireLimits) -> TokenArray:
    if group.id_bytes not in (2, 4):
        raise UnreadableGroup(f"Token ids take 2 or 4 bytes, not {group.id_bytes}.")
    ids = read(group.ids, U2 if group.id_bytes == 2 else I4, total, "ids").astype(np.int32)
    if _largest(ids) >= limits.end_of_ids:
        raise UnreadableGroup(f"Token ids go from {ids.min()} to {ids.max()}; 0 to {limits.end_of_ids - 1} are read.")
    ids.setflags(write=False)
    return ids


def _attention(group: _Group, total: int) -> BoolArray:
    if group.attention_runs is not None:
        return decode_mask(group.attention_runs, total, "attention_runs")
    everywhere = np.ones(total, dtype=np.bool_)
    everywhere.setflags(write=False)
    return everywhere


def _weights(group: _Group, num_items: int) -> Sequence[float]:
    weights = unpacked(group.weights, "d", num_items, "weights")
    if not all(map(math.isfinite, weights)):
        raise UnreadableGroup("weights holds values that are not finite.")
    return weights


def _metas(group: _Group, limits: WireLimits, num_items: int) -> list[dict[str, Any]]:
    if (size := len(group.metas) + len(group.origins)) > limits.max_meta_bytes:
        raise UnreadableGroup(f"The items have {size} bytes of meta; the limit is {limits.max_meta_bytes}.")
    metas = decode_metas(group.metas)
    if len(metas) != num_items:
        raise UnreadableGroup(f"There are {num_items} items, but {len(metas)} metas.")
    return metas


# --- items whose parts have been checked ---

_Made = TypeVar("_Made", SAWItem, SampleAttachments, SampleOrigin)
_SETTERS = {
    kind: {field.name: kind.__dict__[field.name].__set__ for field in fields(kind)}
    for kind in (SAWItem, SampleAttachments, SampleOrigin)
}


_run_all = deque[None](maxlen=0).extend
"""Consumes an iterator without a loop in Python."""


def _made(kind: type[_Made], **columns: Sequence[Any]) -> list[_Made]:
    """Build objects from the values of each field, equal to what the constructor builds.

    The constructors check and copy one item at a time, which takes several times as long as the rest of decoding. The code above
    makes the same checks for the whole group at once; tests compare the two.
    """
    setters = _SETTERS[kind]
    assert columns.keys() == setters.keys(), f"every field of {kind.__name__} has a value"
    made = [object.__new__(kind) for _ in next(iter(columns.values()))]
    for name, column in columns.items():
        assert len(column) == len(made), f"{name} has a value for every object"
        _run_all(map(setters[name], made, column))
    return made
