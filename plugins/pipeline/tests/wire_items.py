"""Items of every kind for tests of the wire format, and what it means that two of them are the same."""

import dataclasses
import functools
import math
from itertools import pairwise
from typing import Any, Literal, get_type_hints

import numpy as np
from hypothesis import strategies as st

from ludic.types import (
    ActorTokenLogps,
    CandidateSets,
    Image,
    ImageSpan,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    StopReason,
    VersionRun,
)

PER_TOKEN = ("token_weights", "token_rewards", "token_values", "token_returns", "teacher_logps", "token_turns")

finite = st.floats(allow_nan=False, allow_infinity=False)
finite32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
any32 = st.floats(width=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ints = st.integers(-(2**63), 2**64 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | ints | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
metas = st.dictionaries(texts, json_values, max_size=4)


ORIGIN_VALUES: dict[Any, st.SearchStrategy] = {
    str | None: st.none() | texts,
    int | None: st.none() | ints,
    float | None: st.none() | st.floats(),
    dict[str, float] | None: st.none() | st.dictionaries(texts, st.floats(), max_size=3),
    StopReason | None: st.none() | st.sampled_from(StopReason),
    Literal["agent", "env"] | None: st.sampled_from([None, "agent", "env"]),
    int: ints,
    bool: st.booleans(),
}
origins = st.builds(SampleOrigin, **{name: ORIGIN_VALUES[hint] for name, hint in get_type_hints(SampleOrigin).items()})


@functools.cache  # Hypothesis checks a strategy when it is first drawn from, which takes longer than drawing
def floats(count: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray | None]:
    """None, all different, or a few values in long runs; contiguous or not."""
    free = st.lists(values, min_size=count, max_size=count)
    runs = st.lists(values, min_size=1, max_size=2).map(
        lambda few: [few[k * len(few) // max(count, 1)] for k in range(count)]
    )
    return st.none() | st.tuples(free | runs, st.booleans()).map(lambda drawn: float_array(*drawn))


@functools.cache
def masks(length: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.booleans(), min_size=length, max_size=length).map(lambda mask: np.array(mask, dtype=np.bool_))


def float_array(values: list[float], is_strided: bool) -> np.ndarray:
    dense = np.array(values, dtype=np.float32)
    return np.repeat(dense, 3)[::3] if is_strided else dense


@st.composite
def version_runs(draw, count: int) -> tuple[VersionRun, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    bounds = [0, *cuts, count]
    versions = draw(st.lists(st.integers(-1, 2**63 - 1), min_size=len(bounds) - 1, max_size=len(bounds) - 1))
    lengths = [end - start for start, end in pairwise(bounds)]
    return tuple(VersionRun(version, length) for version, length in zip(versions, lengths, strict=True))


other_candidates = st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=3)


@st.composite
def candidates(draw, tokens: list[int]) -> CandidateSets:
    """Each token among some candidates, or drawn from the whole vocabulary."""
    drawn = [draw(other_candidates) for _ in tokens]
    return CandidateSets.of([[] if ids is None else [*ids, own] for ids, own in zip(drawn, tokens, strict=True)])


PICTURES = [Image.of(np.full((2, 2), level, dtype=np.uint8)) for level in (0, 90, 255)]


@st.composite
def images(draw, length: int) -> tuple[ImageSpan, ...]:
    """Pictures in some tokens of an item, in order and apart."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4, unique=True)))
    return tuple(
        ImageSpan(draw(st.sampled_from(PICTURES)), start, end - start)
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )


@st.composite
def experts(draw, length: int) -> np.ndarray:
    """Three experts in each of two mixture layers."""
    flat = draw(st.lists(st.integers(-1, 2**15 - 1), min_size=6 * length, max_size=6 * length))
    return np.array(flat, dtype=np.int16).reshape(length, 2, 3)


@st.composite
def attachments(draw, tokens: list[int], length: int) -> SampleAttachments:
    count = len(tokens)
    logps = draw(floats(count, any32))
    return SampleAttachments(
        actor_logps=None if logps is None else ActorTokenLogps(logps),
        temperature=draw(st.none() | st.floats(0, 1e300)),
        candidates=draw(st.none() | candidates(tokens)),
        untrainable_sampling=draw(st.none() | texts),
        version_runs=draw(st.just(()) | version_runs(count)),
        images=draw(st.just(()) | images(length)),
        experts=draw(st.none() | experts(length)),
        **{name: draw(floats(count, finite32)) for name in PER_TOKEN},
    )


@st.composite
def items(draw) -> SAWItem:
    length = draw(st.integers(0, 12))
    largest = draw(st.sampled_from([5, 2**16 - 1, 2**16, 2**31 - 1]))
    ids = np.array(draw(st.lists(st.integers(0, largest), min_size=length, max_size=length)), dtype=np.int32)
    if draw(st.booleans()):
        ids = np.stack([ids, ids], axis=1)[:, 0]  # not contiguous
    action = draw(masks(length))
    return SAWItem(
        ids,
        draw(st.none() | masks(length)),
        action,
        draw(finite),
        draw(metas),
        draw(attachments(ids[action].tolist(), length)),
        draw(origins),
    )


groups = st.lists(items(), min_size=1, max_size=4)


def plain_item(length: int = 6, *, version: int = 3, **meta: Any) -> SAWItem:
    """Two prompt tokens, the rest sampled by `version`."""
    count = length - 2
    return SAWItem(
        np.arange(length, dtype=np.int32),
        None,
        np.arange(length) >= 2,
        0.5,
        meta,
        SampleAttachments(
            actor_logps=ActorTokenLogps(np.full(count, -0.5, dtype=np.float32)),
            token_rewards=np.zeros(count, dtype=np.float32),
            temperature=1.0,
            version_runs=(VersionRun(version, count),),
        ),
        SampleOrigin(rollout_id="r"),
    )


def facts(value: Any) -> Any:
    """Everything that an item is, bit for bit, as plain values that can be compared."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {
            field.name: facts(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, dict):
        return {key: facts(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [facts(inner) for inner in value]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    return type(value).__name__, value


def as_constructed(item: SAWItem) -> SAWItem:
    """The same fields through the constructors, which check all that an item promises."""
    attached = item.attachments
    logps = None if attached.actor_logps is None else ActorTokenLogps(attached.actor_logps.token_logps)
    again = dataclasses.replace(attached, actor_logps=logps)
    origin = SampleOrigin(
        **{field.name: getattr(item.origin, field.name) for field in dataclasses.fields(SampleOrigin)}
    )
    made = SAWItem(item.input_ids, item.attention_mask, item.action_mask, item.weight, item.meta, again, origin)
    for mask in (made.attention_mask, made.action_mask):
        mask.setflags(write=False)  # the constructor hands out writable masks; decoded ones are shared by the group
    return made
