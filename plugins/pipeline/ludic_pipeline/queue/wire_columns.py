"""Arrays on the wire: each field is one little-endian array for all items of a group.

Reading trusts no length: the size of an array follows from the arrays before it, and the message bounds the first ones. The
arrays that are returned are copies and do not keep the message in memory.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ludic.types import CandidateSets, ConfigError, ExpertArray, FloatArray, Image, ImageSpan, LudicError, TokenArray


class UnreadableGroup(LudicError, ValueError):
    """Bytes that this learner cannot read as a group; it moves them to the dead letters."""


class UnwritableGroup(LudicError, ValueError):
    """Items that cannot be written so that a learner gets the same items back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLimits:
    """Limits that are checked before memory is allocated."""

    max_bytes: int = 64 << 20
    """Of one group, and of what a compressed one unpacks to."""
    max_items: int = 4096
    max_tokens: int = 1_048_576
    """Of one item."""
    max_meta_bytes: int = 4 << 20
    """Of the meta and origin of all items of a group. Small values take a byte on the wire and seventy in memory."""
    max_version_runs: int = 262_144
    """Of all items of a group; each becomes a Python object."""
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


U2, U4, I2, I4 = (np.dtype(code) for code in ("<u2", "<u4", "<i2", "<i4"))
F4 = np.dtype("<f4")

BoolArray = npt.NDArray[np.bool_]


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


def read_any(data: memoryview, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """As many whole numbers as there are."""
    return read(data, dtype, len(data) // dtype.itemsize, name)


# --- runs ---


def _run_bounds(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where each stretch of equal values begins, and the length at the end."""
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
    runs = read_any(data, U4, name)
    is_true = np.zeros(len(runs), dtype=np.bool_)
    is_true[1::2] = True
    mask = repeated(is_true, runs, length, name)
    mask.setflags(write=False)
    return mask


def repeated(values: npt.NDArray[Any], runs: npt.NDArray[np.uint32], length: int, name: str) -> npt.NDArray[Any]:
    """Each value as often as its run says; all runs together cover `length`."""
    covered = int(runs.sum(dtype=np.uint64))
    if covered != length:
        raise UnreadableGroup(f"The runs of {name} cover {covered} tokens of {length}.")
    return np.repeat(values, runs)


# --- float columns ---


class FloatColumn(msgspec.Struct, gc=False, omit_defaults=True):
    """One float32 per action token of the items that have it."""

    values: memoryview
    runs: memoryview | None = None
    """How often each value is repeated; None means once each."""
    items: memoryview | None = None
    """1 for each item that has it, 0 for the others; None means all."""


def encode_floats(arrays: Sequence[FloatArray | None], *, try_runs: bool) -> FloatColumn | None:
    """`try_runs` where values usually repeat: rewards are zero but for a few tokens, weights are constant in a turn."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    items = None if len(present) == len(arrays) else packed([array is not None for array in arrays], "B")
    values = np.concatenate(present)
    if try_runs and len(values):
        bounds = _run_bounds(values.view(np.uint32))  # as bits: a NaN equals itself, and 0.0 is not -0.0
        starts = bounds[:-1]
        if 2 * len(starts) < len(values):
            return FloatColumn(values=raw(values[starts], F4), runs=raw(bounds[1:] - starts, U4), items=items)
    return FloatColumn(values=raw(values, F4), items=items)


def decode_floats(
    column: FloatColumn | None, counts: Sequence[int], name: str, *, must_be_finite: bool
) -> list[FloatArray | None]:
    """One array per item, None for items without; `counts` are the items' action tokens."""
    if column is None:
        return [None] * len(counts)
    has_it: Sequence[bool] = [True] * len(counts)
    if column.items is not None:
        has_it = [flag != 0 for flag in unpacked(column.items, "B", len(counts), f"items of {name}")]
    ends = list(accumulate(count if is_there else 0 for count, is_there in zip(counts, has_it, strict=True)))
    values = _float_values(column, ends[-1], name, must_be_finite=must_be_finite)
    return [
        values[end - count : end] if is_there else None
        for count, end, is_there in zip(counts, ends, has_it, strict=True)
    ]


def _float_values(column: FloatColumn, length: int, name: str, *, must_be_finite: bool) -> FloatArray:
    runs = None if column.runs is None else read_any(column.runs, U4, name)
    values = read(column.values, F4, length if runs is None else len(runs), name).astype(np.float32)
    if must_be_finite and not np.isfinite(values).all():
        raise UnreadableGroup(f"{name} holds values that are not finite.")
    if runs is not None:
        values = repeated(values, runs, length, name)
    values.setflags(write=False)
    return values


# --- candidate sets ---


class CandidateColumn(msgspec.Struct, gc=False, omit_defaults=True):
    """Candidates of the action tokens of the items that have them."""

    ids: memoryview
    """int32, of all tokens one after the other."""
    lengths: memoryview
    """uint32 per action token: how many of them are its own; 0 is the whole vocabulary."""
    items: memoryview | None = None
    """1 for each item that has them, 0 for the others; None means all."""


def encode_candidates(given: Sequence[CandidateSets | None], limits: WireLimits) -> CandidateColumn | None:
    present = [candidates for candidates in given if candidates is not None]
    if not present:
        return None
    whole = CandidateSets.joined(present)
    if len(whole.ids) and (whole.ids.min() < 0 or whole.ids.max() >= limits.end_of_ids):
        raise UnwritableGroup(
            f"Candidates hold ids from {whole.ids.min()} to {whole.ids.max()}; a learner reads 0 to {limits.end_of_ids - 1}."
        )
    items = None if len(present) == len(given) else packed([candidates is not None for candidates in given], "B")
    return CandidateColumn(ids=raw(whole.ids, I4), lengths=raw(whole.lengths, U4), items=items)


def decode_candidates(
    column: CandidateColumn | None, counts: Sequence[int], action_ids: Callable[[], TokenArray], limits: WireLimits
) -> list[CandidateSets | None]:
    """One per item, None for items without. `counts` are the items' action tokens, `action_ids` returns these tokens."""
    if column is None:
        return [None] * len(counts)
    tokens = action_ids()
    has_them = [True] * len(counts)
    if column.items is not None:
        has_them = [flag != 0 for flag in unpacked(column.items, "B", len(counts), "items of candidates")]
    starts = [0, *accumulate(counts)]
    own = [count if is_there else 0 for count, is_there in zip(counts, has_them, strict=True)]
    lengths = read(column.lengths, U4, sum(own), "lengths of candidates").astype(np.int64)
    ids = read_any(column.ids, I4, "ids of candidates").astype(np.int32)
    if int(lengths.sum()) != len(ids):
        raise UnreadableGroup(f"Candidates hold {len(ids)} ids, but their lengths add up to {lengths.sum()}.")
    if len(ids) and (ids.min() < 0 or ids.max() >= limits.end_of_ids):
        raise UnreadableGroup(
            f"Candidates hold ids from {ids.min()} to {ids.max()}; 0 to {limits.end_of_ids - 1} are read."
        )
    found: list[CandidateSets | None] = []
    token = place = 0
    for start, count, is_there in zip(starts[:-1], counts, has_them, strict=True):
        if not is_there:
            found.append(None)
            continue
        ends = np.cumsum(lengths[token : token + count])
        size = int(ends[-1]) if count else 0
        candidates = CandidateSets(ids[place : place + size], ends)
        if candidates.first_outside(tokens[start : start + count]) is not None:
            raise UnreadableGroup("An action token is not among the candidates that it is said to be drawn from.")
        found.append(candidates)
        token, place = token + count, place + size
    return found


# --- experts of a mixture ---


class ExpertColumn(msgspec.Struct, gc=False, omit_defaults=True):
    """Experts of all tokens of the items that have them."""

    values: memoryview
    """int16 [tokens, layers, experts per token]."""
    num_layers: int
    num_chosen: int
    items: memoryview | None = None
    """1 for each item that has them, 0 for the others; None means all."""


def encode_experts(given: Sequence[ExpertArray | None]) -> ExpertColumn | None:
    present = [experts for experts in given if experts is not None]
    if not present:
        return None
    shapes = {experts.shape[1:] for experts in present}
    if len(shapes) > 1:
        raise UnwritableGroup(f"Items of one group have experts of different shapes per token: {sorted(shapes)}.")
    items = None if len(present) == len(given) else packed([experts is not None for experts in given], "B")
    num_layers, num_chosen = next(iter(shapes))
    return ExpertColumn(
        values=raw(np.concatenate(present).reshape(-1), I2), num_layers=num_layers, num_chosen=num_chosen, items=items
    )


def decode_experts(column: ExpertColumn | None, lengths: Sequence[int]) -> list[ExpertArray | None]:
    """One per item, None for items without; `lengths` are the items' tokens."""
    if column is None:
        return [None] * len(lengths)
    has_them = [True] * len(lengths)
    if column.items is not None:
        has_them = [flag != 0 for flag in unpacked(column.items, "B", len(lengths), "items of experts")]
    if column.num_layers < 1 or column.num_chosen < 1:
        raise UnreadableGroup(f"Experts of {column.num_layers} layers, {column.num_chosen} per token, are none.")
    ends = list(accumulate(length if there else 0 for length, there in zip(lengths, has_them, strict=True)))
    values = read(column.values, I2, ends[-1] * column.num_layers * column.num_chosen, "experts").astype(np.int16)
    if len(values) and values.min() < -1:
        raise UnreadableGroup(f"Experts go down to {values.min()}; -1 (not known) is the least.")
    values.setflags(write=False)
    shaped = values.reshape(-1, column.num_layers, column.num_chosen)
    return [
        shaped[end - length : end] if there else None
        for length, end, there in zip(lengths, ends, has_them, strict=True)
    ]


# --- pictures ---


class PictureColumn(msgspec.Struct, gc=False, omit_defaults=True):
    """The pictures of a group, each once, and where the items have them."""

    files: list[bytes]
    spans: list[list[tuple[int, int, int]]]
    """Of each item: number of the picture, its first token, its number of tokens."""


def encode_pictures(given: Sequence[tuple[ImageSpan, ...]]) -> PictureColumn | None:
    if not any(given):
        return None
    numbers: dict[str, int] = {}
    files: list[bytes] = []
    for span in (span for spans in given for span in spans):
        if numbers.setdefault(span.image.sha256, len(files)) == len(files):
            files.append(span.image.data)
    return PictureColumn(files, [[(numbers[s.image.sha256], s.start, s.length) for s in spans] for spans in given])


def decode_pictures(column: PictureColumn | None, lengths: Sequence[int]) -> list[tuple[ImageSpan, ...]]:
    """The pictures of items of these lengths."""
    if column is None:
        return [()] * len(lengths)
    if len(column.spans) != len(lengths):
        raise UnreadableGroup(f"There are {len(lengths)} items, but pictures of {len(column.spans)}.")
    try:
        images = [Image.of(file) for file in column.files]
    except ConfigError as error:
        raise UnreadableGroup(f"A picture cannot be read: {error}") from None
    for spans, length in zip(column.spans, lengths, strict=True):
        end = 0
        for number, start, count in spans:
            if not (0 <= number < len(images) and end <= start and 1 <= count <= length - start):
                raise UnreadableGroup(f"Picture {number} at token {start} with {count} tokens is outside its item.")
            end = start + count
    return [tuple(ImageSpan(images[number], start, count) for number, start, count in spans) for spans in column.spans]
