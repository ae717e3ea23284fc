"""The columns of samples (`ludic.types.columns`) on the wire: each is one little-endian array for all items of a group.

Reading trusts no length: the size of an array follows from the arrays before it, and the message bounds the first ones. The
arrays that are returned are copies and do not keep the message in memory.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ludic.types import CandidateSets, ConfigError, Image, ImageSpan, LudicError, MessageSpan, TokenArray, VersionRun
from ludic.types.columns import (
    COLUMNS,
    CandidateColumn,
    Column,
    ImageColumn,
    MessageColumn,
    ValueColumn,
    VersionColumn,
)


class UnreadableGroup(LudicError, ValueError):
    """Bytes that this learner cannot read as a group; it moves them to the dead letters."""


class UnwritableGroup(LudicError, ValueError):
    """Items that cannot be written so that a learner gets the same items back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLimits:
    """Limits that are checked before memory is allocated."""

    max_bytes: int = 64 << 20
    """Bytes of one group, compressed and unpacked."""
    max_items: int = 4096
    max_tokens: int = 1_048_576
    """Tokens of one item."""
    max_meta_bytes: int = 4 << 20
    """Bytes of the meta and origin of all items of a group. Small values take a byte on the wire and seventy in memory."""
    max_version_runs: int = 262_144
    """Version runs of all items of a group; each becomes a Python object."""
    vocab_size: int | None = None
    """Ids from here on are refused: an embedding lookup with them would crash the process. None: no check."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"WireLimits.{field.name}={value}, but a limit below 1 refuses every group. Raise it."
                )

    @property
    def end_of_ids(self) -> int:
        """The first id that is too large."""
        return 1 << 31 if self.vocab_size is None else self.vocab_size


U2, U4, I4 = (np.dtype(code) for code in ("<u2", "<u4", "<i4"))

BoolArray = npt.NDArray[np.bool_]


def too_large(what: str, there_are: int, limit: int, advice: str) -> UnwritableGroup:
    return UnwritableGroup(f"The group has {there_are} {what}; a learner reads at most {limit}. {advice}")


def raw(values: npt.ArrayLike, dtype: np.dtype[Any]) -> memoryview:
    return np.ascontiguousarray(values, dtype=dtype).data


def packed(values: Sequence[float], code: str) -> memoryview:
    """One number per item: "B" uint8, "I" uint32, "q" int64, "d" float64. For so few, faster than an array."""
    return memoryview(struct.pack(f"<{len(values)}{code}", *values))


def unpacked(data: memoryview, code: str, count: int, name: str) -> tuple[Any, ...]:
    size = count * struct.calcsize(f"<{code}")
    if len(data) != size:
        raise UnreadableGroup(f"{name} has {len(data)} bytes; {count} numbers take {size}.")
    return struct.unpack(f"<{count}{code}", data)


def read(data: memoryview, dtype: np.dtype[Any], count: int, name: str) -> npt.NDArray[Any]:
    """The `count` numbers that `data` must be; still a view of it."""
    if len(data) != count * dtype.itemsize:
        raise UnreadableGroup(f"{name} has {len(data)} bytes; {count} numbers take {count * dtype.itemsize}.")
    return np.frombuffer(data, dtype=dtype)


def _read_any(data: memoryview, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """All whole numbers of `data`."""
    return read(data, dtype, len(data) // dtype.itemsize, name)


# --- runs ---


def _run_bounds(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """First place of each stretch of equal values, and the length at the end."""
    edges = (values[1:] != values[:-1]).nonzero()[0]
    bounds = np.empty(len(edges) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(values)
    np.add(edges, 1, out=bounds[1:-1])
    return bounds


def encode_mask(mask: BoolArray) -> memoryview:
    """Lengths of alternating stretches, the first of them False (and so perhaps empty)."""
    bounds = _run_bounds(mask)
    if len(mask) and mask[0]:
        bounds = np.concatenate([bounds[:1], bounds])
    return raw(bounds[1:] - bounds[:-1], U4)


def decode_mask(data: memoryview, length: int, name: str) -> BoolArray:
    runs = _read_any(data, U4, name)
    is_true = np.zeros(len(runs), dtype=np.bool_)
    is_true[1::2] = True
    mask = _repeated(is_true, runs, length, name)
    mask.setflags(write=False)
    return mask


def _repeated(values: npt.NDArray[Any], runs: npt.NDArray[np.uint32], length: int, name: str) -> npt.NDArray[Any]:
    """Each value as often as its run says; all runs together cover `length`."""
    covered = int(runs.sum(dtype=np.uint64))
    if covered != length:
        raise UnreadableGroup(f"The runs of {name} cover {covered} tokens of {length}.")
    return np.repeat(values, runs)


# --- columns ---


class GroupSizes(NamedTuple):
    """Sizes that the columns of a group must fit."""

    lengths: Sequence[int]
    """Tokens of each item."""
    counts: Sequence[int]
    """Action tokens of each item."""
    action_ids: Callable[[], TokenArray]
    limits: WireLimits

    def of(self, column: Column, items: memoryview | None) -> list[int | None]:
        """Number of entries of each item; None for items without the column."""
        sizes = self.lengths if column.of == "all tokens" else self.counts
        if items is None:
            return list(sizes)
        flags = unpacked(items, "B", len(sizes), f"items of {column.name}")
        return [size if flag else None for size, flag in zip(sizes, flags, strict=True)]


def _present(values: Sequence[Any]) -> tuple[list[Any], memoryview | None]:
    """The values that are not None, and one flag per item; None for the flags: every item has one."""
    found = [value for value in values if value is not None]
    return found, None if len(found) == len(values) else packed([value is not None for value in values], "B")


def _check_count(column: Column, found: Sequence[Any], sizes: GroupSizes) -> None:
    if len(found) != len(sizes.counts):
        raise UnreadableGroup(f"There are {len(sizes.counts)} items, but {len(found)} of {column.name}.")


class _ArrayForm(msgspec.Struct, gc=False, omit_defaults=True):
    """The entries of the items that have the column, one item after the other."""

    values: memoryview
    shape: list[int] = []
    """Shape of each token's entry."""
    runs: memoryview | None = None
    """Number of times that each value is repeated; None means once each."""
    items: memoryview | None = None
    """1 for each item that has it, 0 for the others; None means all."""


def _encode_array(column: Column, values: Sequence[Any], limits: WireLimits) -> _ArrayForm | None:
    present, items = _present(values)
    if not present:
        return None
    arrays = [column.array(value) for value in present]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise UnwritableGroup(f"Items of one group have {column.name} of different shapes per token: {sorted(shapes)}.")
    flat, dtype = np.concatenate(arrays).reshape(-1), np.dtype(column.dtype).newbyteorder("<")
    if column.repeats and len(flat):
        bounds = _run_bounds(flat.view(f"u{dtype.itemsize}"))  # as bits: a NaN equals itself, and 0.0 is not -0.0
        starts = bounds[:-1]
        if 2 * len(starts) < len(flat):
            return _ArrayForm(raw(flat[starts], dtype), runs=raw(bounds[1:] - starts, U4), items=items)
    return _ArrayForm(raw(flat, dtype), shape=list(*shapes), items=items)


def _decode_array(column: Column, form: _ArrayForm, sizes: GroupSizes) -> list[Any]:
    if len(form.shape) != len(column.shape) or not all(0 < size < 1 << 15 for size in form.shape):
        raise UnreadableGroup(f"{column.name} has the shape {form.shape[:8]} per token.")
    own = sizes.of(column, form.items)
    ends = list(accumulate(size or 0 for size in own))
    values = _array_values(column, form, ends[-1]).reshape(ends[-1], *form.shape)
    values.setflags(write=False)
    return [
        None if size is None else column.value(values[end - size : end]) for size, end in zip(own, ends, strict=True)
    ]


def _array_values(column: Column, form: _ArrayForm, length: int) -> npt.NDArray[Any]:
    name, dtype = column.name, np.dtype(column.dtype)
    runs = _read_any(form.runs, U4, name) if column.repeats and form.runs is not None else None
    count = length * math.prod(form.shape) if runs is None else len(runs)
    values = read(form.values, dtype.newbyteorder("<"), count, name).astype(dtype)
    if dtype.kind == "f":
        if column.is_finite and not np.isfinite(values).all():
            raise UnreadableGroup(f"{name} holds values that are not finite.")
    elif len(values) and values.min() < -1:
        raise UnreadableGroup(f"{name} go down to {values.min()}; -1 (not known) is the least.")
    return values if runs is None else _repeated(values, runs, length, name)


def _encode_values(column: Column, values: Sequence[Any], limits: WireLimits) -> list[Any] | None:
    present = [value for value in values if value is not None]
    if column.dtype is float and not all(0 <= value < math.inf for value in present):
        raise UnwritableGroup(f"{column.name} {present} are not all finite and at least 0.")
    return [value if value is None else column.dtype(value) for value in values] if present else None


def _decode_values(column: Column, form: list[Any], sizes: GroupSizes) -> list[Any]:
    _check_count(column, form, sizes)
    if column.dtype is float and not all(value is None or 0 <= value < math.inf for value in form):
        raise UnreadableGroup(f"{column.name} holds values that are negative or not finite.")
    return form


class _CandidateForm(msgspec.Struct, gc=False, omit_defaults=True):
    """Candidates of the action tokens of the items that have them."""

    ids: memoryview
    """int32, of all tokens one after the other."""
    lengths: memoryview
    """Number of candidates of each action token, uint32; 0 is the whole vocabulary."""
    items: memoryview | None = None
    """1 for each item that has them, 0 for the others; None means all."""


def _encode_candidates(column: Column, values: Sequence[Any], limits: WireLimits) -> _CandidateForm | None:
    present, items = _present(values)
    if not present:
        return None
    whole = CandidateSets.joined(present)
    if len(whole.ids) and (whole.ids.min() < 0 or whole.ids.max() >= limits.end_of_ids):
        raise UnwritableGroup(
            f"Candidates hold ids from {whole.ids.min()} to {whole.ids.max()}; a learner reads 0 to {limits.end_of_ids - 1}."
        )
    return _CandidateForm(ids=raw(whole.ids, I4), lengths=raw(whole.lengths, U4), items=items)


def _decode_candidates(column: Column, form: _CandidateForm, sizes: GroupSizes) -> list[CandidateSets | None]:
    tokens, limits = sizes.action_ids(), sizes.limits
    own = sizes.of(column, form.items)
    lengths = read(form.lengths, U4, sum(size or 0 for size in own), "lengths of candidates").astype(np.int64)
    ids = _read_any(form.ids, I4, "ids of candidates").astype(np.int32)
    if int(lengths.sum()) != len(ids):
        raise UnreadableGroup(f"Candidates hold {len(ids)} ids, but their lengths add up to {lengths.sum()}.")
    if len(ids) and (ids.min() < 0 or ids.max() >= limits.end_of_ids):
        raise UnreadableGroup(
            f"Candidates hold ids from {ids.min()} to {ids.max()}; 0 to {limits.end_of_ids - 1} are read."
        )
    found: list[CandidateSets | None] = []
    start = token = place = 0
    for count, size in zip(sizes.counts, own, strict=True):
        if size is None:
            found.append(None)
        else:
            ends = np.cumsum(lengths[token : token + size])
            num_ids = int(ends[-1]) if size else 0
            candidates = CandidateSets(ids[place : place + num_ids], ends)
            if candidates.first_outside(tokens[start : start + size]) is not None:
                raise UnreadableGroup("An action token is not among the candidates that it is said to be drawn from.")
            found.append(candidates)
            token, place = token + size, place + num_ids
        start += count
    return found


class _VersionForm(msgspec.Struct, gc=False):
    counts: memoryview
    """Version runs of each item, uint32."""
    versions: memoryview
    """int64."""
    lengths: memoryview
    """uint32."""


def _encode_versions(column: Column, values: Sequence[Any], limits: WireLimits) -> _VersionForm | None:
    runs = [run for own in values for run in own]
    if not runs:
        return None
    if len(runs) > limits.max_version_runs:
        raise too_large("version runs", len(runs), limits.max_version_runs, "Merge runs of the same version.")
    versions, lengths = zip(*runs, strict=True)
    try:
        return _VersionForm(packed([len(own) for own in values], "I"), packed(versions, "q"), packed(lengths, "I"))
    except struct.error as error:
        raise UnwritableGroup(
            f"version_runs {runs[:8]} are not all a version and a length of tokens: {error}."
        ) from None


def _decode_versions(column: Column, form: _VersionForm, sizes: GroupSizes) -> list[tuple[VersionRun, ...]]:
    num_own = unpacked(form.counts, "I", len(sizes.counts), "counts of version_runs")
    num_runs = sum(num_own)
    if num_runs > sizes.limits.max_version_runs:
        raise UnreadableGroup(f"The group has {num_runs} version runs; the limit is {sizes.limits.max_version_runs}.")
    versions = unpacked(form.versions, "q", num_runs, "versions of version_runs")
    lengths = unpacked(form.lengths, "I", num_runs, "lengths of version_runs")
    runs = tuple(map(VersionRun, versions, lengths))
    found: list[tuple[VersionRun, ...]] = []
    start = 0
    for num, count in zip(num_own, sizes.counts, strict=True):
        covered = sum(lengths[start : start + num])
        if num and covered != count:
            raise UnreadableGroup(
                f"The version runs of an item cover {covered} tokens, but it has {count} action tokens."
            )
        found.append(runs[start : start + num])
        start += num
    return found


class _ImageForm(msgspec.Struct, gc=False):
    """The pictures of a group, each once, and their places in the items."""

    files: list[bytes]
    spans: list[list[tuple[int, int, int]]]
    """For each picture of each item: number of the picture, its first token, its number of tokens."""


def _encode_images(column: Column, values: Sequence[tuple[ImageSpan, ...]], limits: WireLimits) -> _ImageForm | None:
    if not any(values):
        return None
    numbers: dict[str, int] = {}
    files: list[bytes] = []
    for span in (span for spans in values for span in spans):
        if numbers.setdefault(span.image.sha256, len(files)) == len(files):
            files.append(span.image.data)
    return _ImageForm(files, [[(numbers[s.image.sha256], s.start, s.length) for s in spans] for spans in values])


def _decode_images(column: Column, form: _ImageForm, sizes: GroupSizes) -> list[tuple[ImageSpan, ...]]:
    _check_count(column, form.spans, sizes)
    try:
        images = [Image.of(file) for file in form.files]
    except ConfigError as error:
        raise UnreadableGroup(f"A picture cannot be read: {error}") from None
    for spans, length in zip(form.spans, sizes.lengths, strict=True):
        end = 0
        for number, start, count in spans:
            if not (0 <= number < len(images) and end <= start and 1 <= count <= length - start):
                raise UnreadableGroup(f"Picture {number} at token {start} with {count} tokens is outside its item.")
            end = start + count
    return [tuple(ImageSpan(images[number], start, count) for number, start, count in spans) for spans in form.spans]


_MessageForm = list[list[tuple[int, str, int, int, int, int]]]


def _encode_messages(column: Column, values: Sequence[Any], limits: WireLimits) -> list[Any] | None:
    return list(values) if any(values) else None


def _decode_messages(column: Column, form: _MessageForm, sizes: GroupSizes) -> list[tuple[MessageSpan, ...]]:
    _check_count(column, form, sizes)
    made = [tuple(MessageSpan(*span) for span in own) for own in form]
    for spans, length in zip(made, sizes.lengths, strict=True):
        edges = [0, *(span.end for span in spans)]
        texts = [span.start <= span.text_start <= span.text_end <= span.end for span in spans]
        if spans and ([*(span.start for span in spans), length] != edges or not all(texts)):
            raise UnreadableGroup(f"The message spans of an item do not cover its {length} tokens once each.")
    return made


_VALUE_FORMS: dict[type[Any], Any] = {float: list[float | None], str: list[str | None]}


class _Codec(NamedTuple):
    form: Callable[[Column], Any]
    """The type on the wire, which msgspec checks."""
    encode: Callable[[Column, Sequence[Any], WireLimits], Any]
    """The values of all items; None where no item has one."""
    decode: Callable[[Column, Any, GroupSizes], Sequence[Any]]
    """One value per item."""


_CODECS: dict[type[Column], _Codec] = {
    Column: _Codec(lambda _: _ArrayForm, _encode_array, _decode_array),
    ValueColumn: _Codec(lambda column: _VALUE_FORMS[column.dtype], _encode_values, _decode_values),
    CandidateColumn: _Codec(lambda _: _CandidateForm, _encode_candidates, _decode_candidates),
    VersionColumn: _Codec(lambda _: _VersionForm, _encode_versions, _decode_versions),
    ImageColumn: _Codec(lambda _: _ImageForm, _encode_images, _decode_images),
    MessageColumn: _Codec(lambda _: _MessageForm, _encode_messages, _decode_messages),
}
_SENT = [
    (column, next(_CODECS[kind] for kind in type(column).__mro__ if kind in _CODECS))
    for column in COLUMNS
    if column.is_sent
]
GroupColumns = msgspec.defstruct(
    "GroupColumns",
    [(column.name, codec.form(column) | None, None) for column, codec in _SENT],
    omit_defaults=True,
    forbid_unknown_fields=True,  # a reader that left a column out would compute wrong ratios
)


def encode_columns(values: Callable[[str], Sequence[Any]], limits: WireLimits) -> msgspec.Struct:
    """The columns of a group; `values` returns one value per item for the name of a column."""
    return GroupColumns(**{column.name: codec.encode(column, values(column.name), limits) for column, codec in _SENT})


def decode_columns(columns: msgspec.Struct, sizes: GroupSizes) -> dict[str, Sequence[Any]]:
    """One value per item for each column."""
    found: dict[str, Sequence[Any]] = {c.name: [c.nothing] * len(sizes.counts) for c in COLUMNS}
    for column, codec in _SENT:
        if (form := getattr(columns, column.name)) is not None:
            found[column.name] = codec.decode(column, form, sizes)
    return found
