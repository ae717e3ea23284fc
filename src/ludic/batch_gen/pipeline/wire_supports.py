"""Supports on the wire: the candidates that each action token of a group was drawn from, as three arrays."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from ludic.batch_gen.pipeline.wire_columns import I4, U4, packed, raw, read, read_any, unpacked
from ludic.batch_gen.pipeline.wire_limits import UnreadableGroup, UnwritableGroup, WireLimits
from ludic.types import TokenArray, TokenSupports


class SupportColumn(msgspec.Struct, gc=False, omit_defaults=True):
    """Candidates of the action tokens of the items that have them."""

    ids: memoryview
    """int32, of all tokens one after the other."""
    lengths: memoryview
    """uint32 per action token: how many of them are its own; 0 is the whole vocabulary."""
    items: memoryview | None = None
    """1 for each item that has them, 0 for the others; None means all."""


def encode_supports(given: Sequence[TokenSupports | None], limits: WireLimits) -> SupportColumn | None:
    present = [supports for supports in given if supports is not None]
    if not present:
        return None
    whole = TokenSupports.joined(present)
    if len(whole.ids) and (whole.ids.min() < 0 or whole.ids.max() >= limits.end_of_ids):
        raise UnwritableGroup(
            f"Supports hold ids from {whole.ids.min()} to {whole.ids.max()}; a learner reads 0 to {limits.end_of_ids - 1}."
        )
    items = None if len(present) == len(given) else packed([supports is not None for supports in given], "B")
    return SupportColumn(ids=raw(whole.ids, I4), lengths=raw(whole.lengths, U4), items=items)


def decode_supports(
    column: SupportColumn | None, counts: Sequence[int], action_ids: TokenArray, limits: WireLimits
) -> list[TokenSupports | None]:
    """One per item, None for items without. `counts` are the items' action tokens, `action_ids` these tokens."""
    if column is None:
        return [None] * len(counts)
    has_them = [True] * len(counts)
    if column.items is not None:
        has_them = [flag != 0 for flag in unpacked(column.items, "B", len(counts), "items of supports")]
    starts = [0, *accumulate(counts)]
    own = [count if is_there else 0 for count, is_there in zip(counts, has_them, strict=True)]
    lengths = read(column.lengths, U4, sum(own), "lengths of supports").astype(np.int64)
    ids = read_any(column.ids, I4, "ids of supports").astype(np.int32)
    if int(lengths.sum()) != len(ids):
        raise UnreadableGroup(f"Supports hold {len(ids)} ids, but their lengths add up to {lengths.sum()}.")
    if len(ids) and (ids.min() < 0 or ids.max() >= limits.end_of_ids):
        raise UnreadableGroup(
            f"Supports hold ids from {ids.min()} to {ids.max()}; 0 to {limits.end_of_ids - 1} are read."
        )
    found: list[TokenSupports | None] = []
    token = place = 0
    for start, count, is_there in zip(starts[:-1], counts, has_them, strict=True):
        if not is_there:
            found.append(None)
            continue
        ends = np.cumsum(lengths[token : token + count])
        size = int(ends[-1]) if count else 0
        supports = TokenSupports(ids[place : place + size], ends)
        if supports.first_outside(action_ids[start : start + count]) is not None:
            raise UnreadableGroup("An action token is not among the candidates that it is said to be drawn from.")
        found.append(supports)
        token, place = token + count, place + size
    return found
