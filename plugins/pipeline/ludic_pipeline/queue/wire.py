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
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ludic.types import (
    ActorTokenLogps,
    MessageSpan,
    MissingExtra,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    TokenArray,
    VersionRun,
)
from ludic.types.errors import how_to_install
from ludic_pipeline.queue.wire_columns import (
    I4,
    U2,
    BoolArray,
    CandidateColumn,
    ExpertColumn,
    FloatColumn,
    PictureColumn,
    UnreadableGroup,
    UnwritableGroup,
    WireLimits,
    decode_candidates,
    decode_experts,
    decode_floats,
    decode_mask,
    decode_pictures,
    encode_candidates,
    encode_experts,
    encode_floats,
    encode_mask,
    encode_pictures,
    packed,
    raw,
    read,
    unpacked,
)
from ludic_pipeline.queue.wire_meta import decode_metas, decode_origins, encode_metas, encode_origins

__all__ = [
    "GroupFacts",
    "UnreadableGroup",
    "UnwritableGroup",
    "WireLimits",
    "decode_group",
    "encode_group",
    "group_facts",
]

MAJOR, MINOR = 2, 1

_MARK = b"LGRP"
_HEADER = struct.Struct("<4sBBB")
_ZSTD = 1
"""A flag: the body is a zstd frame."""
_RESHAPED = 2
"""A flag: the group holds candidate sets. A reader without them would compute wrong ratios, and so must refuse the group."""
_PICTURES = 4
"""A flag: samples hold pictures, which a reader that does not know them would leave out."""
_KNOWN = _ZSTD | _RESHAPED | _PICTURES
_LIMITS = WireLimits()


class GroupFacts(NamedTuple):
    """Facts of a group that the queue stores beside the payload."""

    num_items: int
    oldest_version: int | None
    """Oldest version of any token of any item; None if unknown."""


def group_facts(items: Sequence[SAWItem]) -> GroupFacts:
    versions = [version for item in items if (version := item.oldest_version) is not None]
    return GroupFacts(len(items), min(versions, default=None))


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
    attention_runs: memoryview | None = None
    """None: every token counts."""
    actor_logps: FloatColumn | None = None
    token_weights: FloatColumn | None = None
    token_rewards: FloatColumn | None = None
    token_values: FloatColumn | None = None
    token_returns: FloatColumn | None = None
    teacher_logps: FloatColumn | None = None
    token_turns: FloatColumn | None = None
    temperatures: memoryview | None = None
    """float64 per item, NaN where an item has none; None when no item has one."""
    candidates: CandidateColumn | None = None
    untrainable_sampling: list[str | None] | None = None
    """Reason per item; None if every item is trainable."""
    experts: ExpertColumn | None = None
    run_counts: memoryview | None = None
    """Version runs of each item, uint32; None when no item has any."""
    run_versions: memoryview = memoryview(b"")
    """int64."""
    run_lengths: memoryview = memoryview(b"")
    """uint32."""
    images: PictureColumn | None = None
    message_spans: list[list[tuple[int, str, int, int, int, int]]] | None = None
    """Of each item; None when no item has any."""


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
        **_attachment_fields([item.attachments for item in items]),
        **_candidate_fields([item.attachments for item in items], limits),
        **_version_fields([item.attachments.version_runs for item in items], limits),
        experts=encode_experts([item.attachments.experts for item in items]),
        images=encode_pictures([item.attachments.images for item in items]),
        message_spans=_span_lists(items),
    )
    if (size := len(group.metas) + len(group.origins)) > limits.max_meta_bytes:
        raise _too_large("bytes of meta", size, limits.max_meta_bytes, "Put less into meta.")
    body = _encoder.encode(group)
    flags = _ZSTD * compress + _RESHAPED * (group.candidates is not None or group.untrainable_sampling is not None)
    flags += _PICTURES * (group.images is not None)
    message = _HEADER.pack(_MARK, MAJOR, MINOR, flags) + (_compressed(body) if compress else body)
    size = max(len(message), len(body))
    if size > limits.max_bytes:
        raise _too_large("bytes", size, limits.max_bytes, "Use smaller groups, or raise WireLimits.max_bytes.")
    return message


def _check_size(items: Sequence[SAWItem], limits: WireLimits) -> None:
    if not items:
        raise UnwritableGroup("A group holds at least one item, but this one has none. Do not push it.")
    if len(items) > limits.max_items:
        raise _too_large("items", len(items), limits.max_items, "Use smaller groups, or raise WireLimits.max_items.")
    longest = max(len(item.input_ids) for item in items)
    if longest > limits.max_tokens:
        raise _too_large("tokens in one item", longest, limits.max_tokens, "Raise WireLimits.max_tokens on both sides.")


def _too_large(what: str, there_are: int, limit: int, advice: str) -> UnwritableGroup:
    return UnwritableGroup(f"The group has {there_are} {what}; a learner reads at most {limit}. {advice}")


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


_FLOATS = {
    "token_weights": True,
    "token_rewards": True,
    "token_values": False,
    "token_returns": False,
    "teacher_logps": False,
    "token_turns": True,
}
"""Fields of `SampleAttachments` with a number per action token, in its order; whether values usually repeat."""


def _attachment_fields(attached: list[SampleAttachments]) -> dict[str, Any]:
    logps = [None if a.actor_logps is None else a.actor_logps.token_logps for a in attached]
    return {
        "actor_logps": encode_floats(logps, try_runs=False),
        **{name: encode_floats([getattr(a, name) for a in attached], try_runs=runs) for name, runs in _FLOATS.items()},
        "temperatures": _temperatures([a.temperature for a in attached]),
    }


def _candidate_fields(attached: list[SampleAttachments], limits: WireLimits) -> dict[str, Any]:
    reasons = [a.untrainable_sampling for a in attached]
    return {
        "candidates": encode_candidates([a.candidates for a in attached], limits),
        "untrainable_sampling": reasons if any(reason is not None for reason in reasons) else None,
    }


def _temperatures(values: list[float | None]) -> memoryview | None:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if not all(0 <= value < math.inf for value in present):
        raise UnwritableGroup(f"Temperatures {present} are not all finite and at least 0.")
    return packed([math.nan if value is None else value for value in values], "d")


def _version_fields(runs_of_items: list[tuple[VersionRun, ...]], limits: WireLimits) -> dict[str, Any]:
    runs = [run for runs in runs_of_items for run in runs]
    if not runs:
        return {}
    if len(runs) > limits.max_version_runs:
        raise _too_large("version runs", len(runs), limits.max_version_runs, "Merge runs of the same version.")
    versions, lengths = zip(*runs, strict=True)
    try:
        return {
            "run_counts": packed([len(runs) for runs in runs_of_items], "I"),
            "run_versions": packed(versions, "q"),
            "run_lengths": packed(lengths, "I"),
        }
    except struct.error as error:
        raise UnwritableGroup(
            f"version_runs {runs[:8]} are not all a version and a length of tokens: {error}."
        ) from None


def _span_lists(items: Sequence[SAWItem]) -> list[list[tuple[int, str, int, int, int, int]]] | None:
    spans: list[list[tuple[int, str, int, int, int, int]]] = [list(item.attachments.message_spans) for item in items]
    return spans if any(spans) else None


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
    if flags & ~_KNOWN:
        raise UnreadableGroup(
            f"The group has the flags {flags:#x}, of which this ludic knows {_KNOWN:#x}. Update ludic."
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
    return _made(
        SAWItem,
        [ids[span] for span in spans],
        [attention[span] for span in spans],
        [action[span] for span in spans],
        _weights(group, len(spans)),
        _metas(group, limits, len(spans)),
        _attachments(group, counts, [end - start for start, end in pairwise(bounds)], lambda: ids[action], limits),
        _made(SampleOrigin, *decode_origins(group.origins, len(spans))),
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


def _attachments(
    group: _Group, counts: list[int], lengths: list[int], action_ids: Callable[[], TokenArray], limits: WireLimits
) -> list[SampleAttachments]:
    return _made(
        SampleAttachments,
        _actor_logps(group, counts),
        *(decode_floats(getattr(group, name), counts, name, must_be_finite=True) for name in _FLOATS),
        _read_temperatures(group, len(counts)),
        decode_candidates(group.candidates, counts, action_ids, limits),
        _untrainable_sampling(group, len(counts)),
        _version_runs(group, counts, limits),
        [None] * len(counts),  # proximal_logps, which the trainer computes
        decode_pictures(group.images, lengths),
        decode_experts(group.experts, lengths),
        _message_spans(group, lengths),
        [None] * len(counts),  # observed_roles, which an algorithm sets
    )


def _message_spans(group: _Group, lengths: list[int]) -> list[tuple[MessageSpan, ...]]:
    if group.message_spans is None:
        return [()] * len(lengths)
    if len(group.message_spans) != len(lengths):
        raise UnreadableGroup(f"There are {len(lengths)} items, but message spans of {len(group.message_spans)}.")
    made = [tuple(MessageSpan(*span) for span in own) for own in group.message_spans]
    for spans, length in zip(made, lengths, strict=True):
        edges = [0, *(span.end for span in spans)]
        texts = [span.start <= span.text_start <= span.text_end <= span.end for span in spans]
        if spans and ([*(span.start for span in spans), length] != edges or not all(texts)):
            raise UnreadableGroup(f"The message spans of an item do not cover its {length} tokens once each.")
    return made


def _actor_logps(group: _Group, counts: list[int]) -> list[ActorTokenLogps | None]:
    arrays = decode_floats(group.actor_logps, counts, "actor_logps", must_be_finite=False)
    there = iter(_made(ActorTokenLogps, [array for array in arrays if array is not None]))
    return [None if array is None else next(there) for array in arrays]


def _read_temperatures(group: _Group, num_items: int) -> list[float | None]:
    if group.temperatures is None:
        return [None] * num_items
    values = unpacked(group.temperatures, "d", num_items, "temperatures")
    if any(value < 0 or value == math.inf for value in values):
        raise UnreadableGroup("temperatures holds values that are negative or infinite.")
    return [None if math.isnan(value) else value for value in values]


def _untrainable_sampling(group: _Group, num_items: int) -> list[str | None]:
    if group.untrainable_sampling is None:
        return [None] * num_items
    if len(group.untrainable_sampling) != num_items:
        raise UnreadableGroup(
            f"There are {num_items} items, but {len(group.untrainable_sampling)} of untrainable_sampling."
        )
    return group.untrainable_sampling


def _version_runs(group: _Group, counts: list[int], limits: WireLimits) -> list[tuple[VersionRun, ...]]:
    if group.run_counts is None:
        return [()] * len(counts)
    sizes = unpacked(group.run_counts, "I", len(counts), "run_counts")
    num_runs = sum(sizes)
    if num_runs > limits.max_version_runs:
        raise UnreadableGroup(f"The group has {num_runs} version runs; the limit is {limits.max_version_runs}.")
    versions = unpacked(group.run_versions, "q", num_runs, "run_versions")
    lengths = unpacked(group.run_lengths, "I", num_runs, "run_lengths")
    runs = tuple(map(VersionRun, versions, lengths))
    split: list[tuple[VersionRun, ...]] = []
    start = 0
    for size, count in zip(sizes, counts, strict=True):
        end = start + size
        covered = sum(lengths[start:end])
        if size and covered != count:
            raise UnreadableGroup(
                f"The version runs of an item cover {covered} tokens, but it has {count} action tokens."
            )
        split.append(runs[start:end])
        start = end
    return split


# --- items whose parts have been checked ---

_Made = TypeVar("_Made", SAWItem, SampleAttachments, SampleOrigin, ActorTokenLogps)
_SETTERS = {
    kind: [kind.__dict__[field.name].__set__ for field in fields(kind)]
    for kind in (SAWItem, SampleAttachments, SampleOrigin, ActorTokenLogps)
}


_run_all = deque[None](maxlen=0).extend
"""Consumes an iterator without a loop in Python."""


def _made(kind: type[_Made], *columns: Sequence[Any]) -> list[_Made]:
    """Build objects from columns of field values, in field order, equal to what the constructor builds.

    The constructors check and copy one item at a time, which takes several times as long as the rest of decoding. The code above
    makes the same checks for the whole group at once; tests compare the two.
    """
    made = [object.__new__(kind) for _ in columns[0]]
    for put, column in zip(_SETTERS[kind], columns, strict=True):
        assert len(column) == len(made), "every column has a value for every object"
        _run_all(map(put, made, column))
    return made
