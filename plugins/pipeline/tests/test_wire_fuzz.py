"""Whatever the bytes are: valid items or UnreadableGroup, within the memory that the limits allow.

Over 10,000 cases: random bytes, damaged messages, messages whose body is well-formed msgpack but lies, damaged zstd
frames. Each case is read under small limits with its memory measured, and what is read goes through the constructors.
"""

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from ludic.types import ActorTokenLogps, CandidateSets, SampleAttachments, SampleOrigin, SAWItem, StopReason, VersionRun
from ludic_pipeline.queue.wire import UnreadableGroup, WireLimits, decode_group, encode_group
from plugins.pipeline.tests.wire_items import PER_TOKEN, as_constructed, plain_item
from tests.fuzz import Fuzz

pytestmark = pytest.mark.slow

LIMITS = WireLimits(max_bytes=64 << 10, max_items=64, max_tokens=4096, max_meta_bytes=4 << 10, max_version_runs=256)
MAX_MEMORY = 1 << 20
"""Ids of two bytes become four, and two masks of one byte each; a byte of meta becomes an object of seventy; half of
this is what Python and numpy take for themselves."""
HEADER = 7
AT_ONCE = 250


def read_safely(data: bytes) -> bool:
    """True where `data` is a group; fails on any other error, on invalid items and on too much memory."""
    with traced_memory():
        items = decoded(data)
    return is_valid(items)


@contextlib.contextmanager
def traced_memory() -> Iterator[None]:
    """Seldom begun and ended: in Python 3.11 the end can crash a thread that takes memory (python/cpython#128679)."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def decoded(data: bytes) -> list[SAWItem]:
    items = []
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with contextlib.suppress(UnreadableGroup):
        items = decode_group(data, LIMITS)
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < MAX_MEMORY, f"{peak} bytes for a message of {len(data)}"
    return items


def is_valid(items: list[SAWItem]) -> bool:
    for item in items:
        as_constructed(item)
        assert (item.input_ids >= 0).all() and len(item.input_ids) <= LIMITS.max_tokens
    return bool(items)


# --- messages to start from ---


def random_supports(rng: np.random.Generator, tokens: np.ndarray) -> CandidateSets:
    sizes = rng.integers(0, 4, len(tokens))
    return CandidateSets.of(
        [[*rng.integers(0, 100, size), own] if size else [] for own, size in zip(tokens, sizes, strict=True)]
    )


def random_item(rng: np.random.Generator, length: int) -> SAWItem:
    action = rng.random(length) < rng.random()
    count = int(action.sum())
    cut = int(rng.integers(0, count + 1))
    arrays = {name: rng.random(count, dtype=np.float32) for name in PER_TOKEN if rng.random() < 0.5}
    ids = rng.integers(0, rng.choice([100, 100_000]), length).astype(np.int32)
    return SAWItem(
        ids,
        None if rng.random() < 0.5 else rng.random(length) < 0.9,
        action,
        float(rng.normal()),
        {"turns": [1, {"deep": None}], "text": "é" * 3},
        SampleAttachments(
            actor_logps=None if rng.random() < 0.3 else ActorTokenLogps(-rng.random(count, dtype=np.float32)),
            temperature=None if rng.random() < 0.5 else 0.7,
            candidates=random_supports(rng, ids[action]) if rng.random() < 0.5 else None,
            untrainable_sampling="top_p=0.9" if rng.random() < 0.3 else None,
            version_runs=(VersionRun(3, cut), VersionRun(4, count - cut)) if rng.random() < 0.7 else (),
            **arrays,
        ),
        SampleOrigin(rollout_id="r1", segment=2, reward=0.5, stop=StopReason.MAX_STEPS if rng.random() < 0.5 else None),
    )


def messages() -> list[bytes]:
    rng = np.random.default_rng(0)
    sizes = [(1, 0), (1, 1), (1, 9), (2, 5), (3, 40), (8, 200), (64, 3)]
    groups = [[random_item(rng, length) for _ in range(count)] for count, length in sizes * 3]
    return [encode_group(group, limits=LIMITS) for group in [*groups, [plain_item()] * 4]]


MESSAGES = messages()
BODIES = [message[HEADER:] for message in MESSAGES]
FIELDS = [msgspec.msgpack.decode(body) for body in BODIES]
PLAIN, PACKED = MESSAGES[0][:HEADER], MESSAGES[0][: HEADER - 1] + b"\x01"


def test_the_messages_to_start_from_are_read():
    assert all(read_safely(message) for message in MESSAGES)


# --- bytes ---


def read_all(fuzz: Fuzz, num_cases: int, make: Callable[[random.Random], bytes]) -> list[bool]:
    """What `read_safely` says of each case. A case costs a tenth of what Hypothesis adds to it, and has nothing to shrink: it is
    a seed."""
    found: list[bool] = []
    last = fuzz.cases(num_cases)
    for first in range(0, last, AT_ONCE):
        messages = {case: make(fuzz.rng(case)) for case in range(first, min(first + AT_ONCE, last))}
        with traced_memory():
            groups = {case: of_case(fuzz, case, data, decoded, data) for case, data in messages.items()}
        found += [of_case(fuzz, case, messages[case], is_valid, items) for case, items in groups.items()]
    return found


def of_case(fuzz: Fuzz, case: int, data: bytes, check: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return check(argument)
    except Exception as error:
        raise AssertionError(f"{fuzz.at(case)}: {data!r}") from error


@pytest.mark.slow
def test_random_bytes(fuzz):
    def some(rng: random.Random) -> bytes:
        length = rng.choice([rng.randrange(9), rng.randrange(301)])
        data = rng.choice([rng.randbytes(length), rng.randbytes(1) * length])
        return rng.choice([b"", b"LGRP", PLAIN, PACKED]) + data

    assert not any(read_all(fuzz, 2500, some))


@pytest.mark.parametrize("data", [b"", PLAIN, PACKED])
def test_a_message_without_a_body_is_refused(data):
    assert not read_safely(data)


@pytest.mark.slow
def test_damaged_messages(fuzz):
    read_all(fuzz, 4500, lambda rng: damaged(rng.choice(MESSAGES), rng))


def damaged(message: bytes, rng: random.Random) -> bytes:
    """A few of: flipped bits, other bytes, a lost, repeated or foreign stretch, a cut."""
    data = bytearray(message)
    for _ in range(rng.choice([1, 1, 2, 5])):
        # Damage to what describes the arrays is rarer than to the arrays by size, and more dangerous.
        reach = len(data) if rng.random() < 0.5 else min(len(data), 64)
        at, length = rng.randrange(reach + 1), rng.choice([1, 2, 4, 8, 30])
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + length] = rng.randbytes(length)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length]
            case 4:
                other = rng.choice(MESSAGES)
                start = rng.randrange(len(other))
                data[at : at + length] = other[start : start + length]
            case _:
                del data[at:]
    return bytes(data)


# --- well-formed lies ---


@pytest.mark.slow
def test_messages_with_inconsistent_fields_are_refused(fuzz):
    read_all(fuzz, 3500, lying)


def lying(rng: random.Random) -> bytes:
    changed = dict(rng.choice(FIELDS))
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.6 and isinstance(changed.get("columns"), dict):
            changed["columns"] = columns = dict(changed["columns"])
            name = rng.choice([*columns, "token_values", "version_runs", "experts", "temperature", "unknown"])
            columns[name] = lie(columns.get(name, b""), rng)
            continue
        name = rng.choice([*changed, "attention_runs", "unknown"])
        changed[name] = lie(changed.get(name, b""), rng)
        if rng.random() < 0.05:
            del changed[name]
    body = msgspec.msgpack.encode(changed)
    return PACKED + zstandard.compress(body) if rng.random() < 0.5 else PLAIN + body


def lie(value, rng: random.Random):
    """Something like `value` that it is not."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice([*value, "runs", "items", "values", "shape"])
        return {**value, name: lie(value.get(name, b""), rng)}
    if isinstance(value, bytes) and rng.random() < 0.8:
        return wrong_array(value, rng)
    return rng.choice([None, -1, 0, 2, 2**63, 1e308, "text", b"", [], {}, [[]] * 50, {"a": {"b": b"c"}}, NESTED])


NESTED = msgspec.Raw(b"\x91" * 20_000 + b"\x01")


def wrong_array(data: bytes, rng: random.Random) -> bytes:
    """Another number in it, other numbers, more or fewer of them, or the metas or origins of another message."""
    match rng.randrange(5):
        case 0 if len(data) >= 4:
            at = 4 * rng.randrange(len(data) // 4)
            return data[:at] + struct.pack("<I", rng.choice(NUMBERS)) + data[at + 4 :]
        case 1:
            return b"".join(struct.pack("<I", rng.choice(NUMBERS)) for _ in range(rng.randrange(40)))
        case 2:
            return data * rng.choice([0, 2, 3])
        case 3:
            return rng.choice(FIELDS)[rng.choice(["metas", "origins"])]
        case _:
            return rng.randbytes(rng.randrange(3 * len(data) + 1))


NUMBERS = [0, 1, 2, 5, 255, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x7FC00000, 0x7F800000, 0xFF800000]
"""Lengths that wrap around, and the bits of NaN and the infinities."""


@pytest.mark.slow
def test_damaged_zstd_frames(fuzz):
    read_all(fuzz, 1000, damaged_frame)


def damaged_frame(rng: random.Random) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=rng.random() < 0.8, write_checksum=rng.random() < 0.5)
    frame = compressor.compress(rng.choice(BODIES))
    return PACKED + damaged(frame, rng)


# --- attacks by name ---


def frame_that_claims(size: int) -> bytes:
    """A zstd frame header that declares `size`, and an empty last block."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", size) + b"\x01\x00\x00"


def with_metas(metas: bytes) -> bytes:
    return PLAIN + msgspec.msgpack.encode({**FIELDS[-1], "metas": metas})


def with_origins(origins: bytes) -> bytes:
    return PLAIN + msgspec.msgpack.encode({**FIELDS[-1], "origins": origins})


def with_columns(**columns) -> bytes:
    return PLAIN + msgspec.msgpack.encode({**FIELDS[-1], "columns": {**FIELDS[-1]["columns"], **columns}})


ATTACKS = {
    "origins of four billion": with_origins(b"\x81\xaarollout_id\xdd\xff\xff\xff\xff"),
    "a field of an origin of four billion bytes": with_origins(b"\x81\xaarollout_id\x94\xdb\xff\xff\xff\xff"),
    "an unknown field of an origin that is deep": with_origins(b"\x81\xa1z" + b"\x91" * 4000),
    "origins of more items than there are": with_origins(b"\x81\xa7segment\xdc\x0f\x00" + b"\x7f" * 0xF00),
    "zeros that pack well": PACKED + zstandard.compress(bytes(64 << 20)),
    "a bomb of unknown size": PACKED + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20)),
    "a frame that claims the whole memory": PACKED + frame_that_claims(1 << 62),
    "a frame that claims just what it may": PACKED + frame_that_claims(LIMITS.max_bytes),
    "two frames": PACKED + 2 * zstandard.compress(BODIES[0]),
    "a message beyond the limit": PLAIN + bytes(LIMITS.max_bytes),
    "a list of four billion": PLAIN + b"\xdd\xff\xff\xff\xff",
    "a map of four billion": PLAIN + b"\xdf\xff\xff\xff\xff",
    "an array of four billion bytes": PLAIN + b"\x81\xa3ids\xc6\xff\xff\xff\xff",
    "an unknown field that is deep": PLAIN + b"\x81\xa1z" + b"\x91" * 60_000,
    "an unknown field of four billion": PLAIN + b"\x81\xa1z\xdd\xff\xff\xff\xff",
    "metas of four billion": with_metas(b"\xdd\xff\xff\xff\xff"),
    "a deep list in meta": with_metas(b"\x91\x81\xa1a" + b"\x91" * 4000),
    "a deep map in meta": with_metas(b"\x91\x81\xa1a" + b"\x81\xa1a" * 1300),
    "maps that grow in memory": with_metas(b"\x91\x81\xa1a\xdc\x0f\x00" + b"\x80" * 0xF00),
    "lists of lists of four billion": with_metas(b"\x91\x81\xa1a" + b"\xdd\xff\xff\xff\xff" * 30),
    "masks of four billion tokens": PLAIN
    + msgspec.msgpack.encode({**FIELDS[-1], "action_runs": struct.pack("<3I", 2**32 - 1, 2**32 - 1, 26)}),
    "values repeated four billion times": with_columns(
        token_rewards={"values": bytes(4), "runs": struct.pack("<I", 2**32 - 1)}
    ),
    "experts of a huge shape": with_columns(experts={"values": b"", "shape": [2**62, 2**62]}),
    "items of four billion tokens": PLAIN + msgspec.msgpack.encode({**FIELDS[-1], "lengths": b"\xff" * 16}),
    "version runs of four billion": with_columns(
        version_runs={"counts": b"\xff" * 16, "versions": b"", "lengths": b""}
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_message_is_refused(name):
    assert not read_safely(ATTACKS[name])


def test_the_largest_group_within_the_limits_takes_no_more_memory_than_is_said():
    """What the other cases are measured against: as many tokens, metas and version runs as can be."""
    rng = np.random.default_rng(0)
    item = SAWItem(
        rng.integers(0, 2**16, 4096),
        None,
        np.arange(4096) >= 2048,
        1.0,
        {"empty": [[]] * 500},
        SampleAttachments(version_runs=[(7, 64)] * 32),
    )
    assert read_safely(encode_group([item] * 7, limits=LIMITS))
