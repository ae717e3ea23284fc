"""What goes over the wire comes back the same, and what would not is refused by the writer."""

import dataclasses
import enum
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.types import CandidateSets, LudicError, SampleAttachments, SAWItem, VersionRun
from ludic_pipeline.queue.wire import (
    MAJOR,
    MINOR,
    UnreadableGroup,
    UnwritableGroup,
    WireLimits,
    decode_group,
    encode_group,
    group_facts,
)
from ludic_pipeline.queue.wire_columns import GroupColumns
from plugins.pipeline.tests.wire_items import PICTURES, as_constructed, facts, groups, plain_item

pytestmark = pytest.mark.slow

HEADER = 7


def frozen_masks(items):
    return [as_constructed(item) for item in items]


@settings(max_examples=80)
@given(groups, st.booleans())
def test_every_group_comes_back_bit_for_bit_and_as_the_constructors_would_make_it(items, compress):
    decoded = decode_group(encode_group(items, compress=compress))
    assert facts(decoded) == facts(frozen_masks(items))
    assert facts(decoded) == facts(frozen_masks(decoded))


def test_hundreds_of_turns_come_back_as_they_were():
    """Runs are written out in another way when there are many."""
    action = np.arange(4000) % 4 != 0
    weights = np.repeat(np.arange(600, dtype=np.float32), 5)
    attached = SampleAttachments(token_weights=weights, version_runs=[(v, 10) for v in range(300)])
    item = SAWItem(np.arange(4000), np.arange(4000) % 5 != 0, action, 1.0, {}, attached)
    data = encode_group([item, item])
    assert facts(decode_group(data)) == facts(frozen_masks([item, item]))
    values = msgspec.msgpack.decode(data[HEADER:])["columns"]["token_weights"]["values"]
    assert len(values) == 4 * 1200, "one value per run, not per token"


def test_ids_that_fit_take_two_bytes_and_masks_and_zeros_next_to_none():
    small, large = plain_item(10_000), plain_item(10_000)
    large = dataclasses.replace(large, input_ids=large.input_ids + 70_000)
    assert len(encode_group([small])) < 10_000 * (2 + 4) + 600
    assert len(encode_group([large])) - len(encode_group([small])) == 20_000


def test_the_oldest_version_of_a_group_is_that_of_its_oldest_token():
    later = dataclasses.replace(
        plain_item(), attachments=SampleAttachments(version_runs=(VersionRun(9, 1), VersionRun(7, 3)))
    )
    without_version = dataclasses.replace(plain_item(), attachments=SampleAttachments())
    assert group_facts([later, plain_item(version=8), without_version]) == (3, 7)
    assert group_facts([without_version]) == (1, None)


# --- meta ---


class Stop(enum.StrEnum):
    DONE = "done"


class Level(enum.IntEnum):
    HARD = 3


def test_meta_comes_back_as_plain_json():
    meta = {
        "stop": Stop.DONE,
        "level": Level.HARD,
        "mean": np.float64(0.25),
        "pair": (1, 2),
        "deep": {"a": [{"b": None}]},
        Stop.DONE: 1,
    }
    (back,) = decode_group(encode_group([plain_item(**meta)]))
    plain = {"stop": "done", "level": 3, "mean": 0.25, "pair": [1, 2], "deep": {"a": [{"b": None}]}, "done": 1}
    assert facts(back.meta) == facts(plain)


@pytest.mark.parametrize(
    "value", [{1}, b"x", object(), np.int64(3), np.zeros(2), 2**64, -(2**63) - 1, "\ud800", 1j, {1: 2}, {"\udc00": 1}]
)
def test_a_value_that_is_not_json_is_refused_by_its_key(value):
    with pytest.raises(UnwritableGroup, match=r"meta\['guilty'\]"):
        encode_group([plain_item(), plain_item(guilty=value, innocent=1)])


def test_a_meta_that_contains_itself_is_refused_by_its_key():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnwritableGroup, match=r"meta\['loop'\].*deeper than 32"):
        encode_group([plain_item(loop=loop)])


def test_meta_may_be_as_deep_as_is_said_and_no_deeper():
    nested: object = 1
    for _ in range(31):
        nested = [nested]
    (back,) = decode_group(encode_group([plain_item(nested=nested)]))
    assert back.meta["nested"] == nested
    with pytest.raises(UnwritableGroup, match="deeper"):
        encode_group([plain_item(nested=[nested])])


# --- origins ---


def test_rewards_that_are_numpys_come_back_as_plain_ones():
    (back,) = decode_group(encode_group([plain_item().with_origin(reward=np.float32(0.5), total_reward=2)]))
    assert (type(back.origin.reward), back.origin.reward, back.origin.total_reward) == (float, 0.5, 2.0)


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        ({"rollout_id": 3}, "Expected `str | null`, got `int`.*rollout_id"),
        ({"group_id": "x" * 1025}, "length <= 1024.*group_id"),
        ({"env_name": "\ud800"}, "surrogates"),
        ({"env_seed": 2**64}, "can't serialize ints"),
        ({"env_seed": "1"}, "Expected `int | null`, got `str`.*env_seed"),
        ({"num_turns": True}, "num_turns"),
        ({"truncated": 2}, "Expected `bool`, got `int`.*truncated"),
        ({"stop": "bored"}, "Invalid enum value 'bored'.*stop"),
        ({"step_kind": "both"}, "Invalid enum value 'both'.*step_kind"),
    ],
)
def test_an_origin_that_a_learner_could_not_read_is_refused_by_the_writer(fact, message):
    with pytest.raises(UnwritableGroup, match=message.replace("|", "\\|")):
        encode_group([plain_item(), plain_item().with_origin(**fact)])


# --- what cannot be written ---


def with_attachments(**fields):
    return dataclasses.replace(plain_item(), attachments=SampleAttachments(**fields))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "at least one item"),
        ([plain_item()] * 5, "5 items; a learner reads at most 4"),
        ([plain_item(200)], "200 tokens in one item"),
        ([plain_item(text="x" * 300)], "bytes of meta"),
        ([plain_item(100)] * 4, "bytes; a learner reads at most 2000"),
        ([with_attachments(version_runs=[(v, int(v < 4)) for v in range(9)])], "9 version runs"),
        ([SAWItem([1, -1], None, [0, 1], 1.0)], "from -1 to 1; a learner reads 0 to 2147483647"),
        ([with_attachments(temperature=float("nan"))], "temperature .* are not all finite"),
        ([with_attachments(temperature=-1.0)], "temperature .* are not all finite"),
        ([with_attachments(candidates=CandidateSets.of([[2, -1], [], [], []]))], "from -1 to 2; a learner reads 0"),
        ([with_attachments(version_runs=[(1, 6), (2, -2)])], "version_runs"),
        ([with_attachments(version_runs=[(2**63, 4)])], "version_runs"),
        ([with_attachments(version_runs=[(0.5, 4)])], "version_runs"),
        ([with_attachments(version_runs=[(None, 4)])], "version_runs"),
    ],
)
def test_what_a_learner_would_not_get_back_is_refused_by_the_writer(items, message):
    limits = WireLimits(max_bytes=2000, max_items=4, max_tokens=100, max_meta_bytes=280, max_version_runs=8)
    with pytest.raises(UnwritableGroup, match=message):
        encode_group(items, limits=limits)


def test_the_writer_refuses_a_number_of_tokens_or_bytes_just_beyond_the_limit_that_the_reader_keeps():
    items = [plain_item(50), plain_item(100)]
    size = len(encode_group(items))
    limits = WireLimits(max_bytes=size, max_items=2, max_tokens=100)
    assert len(decode_group(encode_group(items, limits=limits), limits)) == 2
    for tighter in ({"max_bytes": size - 1}, {"max_items": 1}, {"max_tokens": 99}):
        narrow = dataclasses.replace(limits, **tighter)
        with pytest.raises(UnwritableGroup):
            encode_group(items, limits=narrow)
        with pytest.raises(UnreadableGroup):
            decode_group(encode_group(items), narrow)


# --- versions ---


def with_version(data: bytes, major: int, minor: int) -> bytes:
    return data[:4] + bytes([major, minor]) + data[6:]


def with_fields(data: bytes, **changed) -> bytes:
    """The message with other fields or columns."""
    fields = msgspec.msgpack.decode(data[HEADER:])
    columns = {name: changed.pop(name) for name in GroupColumns.__struct_fields__ if name in changed}
    return data[:HEADER] + msgspec.msgpack.encode({**fields, "columns": {**fields["columns"], **columns}, **changed})


def test_a_newer_minor_version_is_read_and_its_new_fields_are_ignored():
    items = [plain_item(task="t")]
    new = {"later": [1, {"x": b"y"}], "mask_of_the_future": b"\x00" * 100}
    newer = with_fields(with_version(encode_group(items), MAJOR, MINOR + 7), **new)
    assert facts(decode_group(newer)) == facts(frozen_masks(items))


@pytest.mark.parametrize(
    ("major", "minor", "message"),
    [
        (MAJOR + 1, 4, rf"wire format {MAJOR + 1}\.4.*reads {MAJOR}\.x.*Update ludic on the learner"),
        (0, 9, r"wire format 0\.9.*Update ludic on the actor"),
    ],
)
def test_another_major_version_is_refused_with_what_to_do(major, minor, message):
    with pytest.raises(UnreadableGroup, match=message) as caught:
        decode_group(with_version(encode_group([plain_item()]), major, minor))
    assert isinstance(caught.value, LudicError) and isinstance(caught.value, ValueError)


def test_an_unknown_flag_is_refused():
    data = bytearray(encode_group([plain_item()]))
    data[6] |= 8
    with pytest.raises(UnreadableGroup, match="flags 0x9|flags 0x8"):
        decode_group(bytes(data))


# --- what is refused by the reader ---


def u4(*values):
    return np.array(values, dtype="<u4").tobytes()


def floats(*values):
    return np.array(values, dtype="<f8").tobytes()


def origins(**columns):
    return msgspec.msgpack.encode(columns)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": np.array([0, 1, 2, 3, 4, -1], dtype="<i4").tobytes(), "id_bytes": 4}, "-1 to 4"),
        ({"ids": b"\x00" * 11}, "ids has 11 bytes; 6 numbers take 12"),
        ({"id_bytes": 3}, "2 or 4 bytes, not 3"),
        ({"lengths": u4()}, "0 items"),
        ({"lengths": u4(3, 3)}, "weights has 8 bytes"),
        ({"lengths": u4(2**32 - 1)}, "4294967295 tokens"),
        ({"action_runs": u4(2, 5)}, "cover 7 tokens of 6"),
        ({"action_runs": u4(2, 3, 1)}, "actor_logps has 16 bytes; 3 numbers take 12"),
        ({"action_runs": u4(2**32 - 1, 2**32 - 1, 8)}, "of 6"),
        ({"attention_runs": u4(1)}, "attention_runs cover 1"),
        ({"attention_runs": u4(*[1] * 300)}, "attention_runs cover 300 tokens of 6"),
        ({"token_rewards": {"values": b"\x00" * 1200, "runs": u4(*[2**32 - 1] * 300)}}, "token_rewards cover .* of 4"),
        ({"token_rewards": {"values": b"\x00" * 8, "runs": u4(4)}}, "token_rewards has 8 bytes; 1 numbers"),
        ({"weights": floats(np.inf)}, "weights holds values that are not finite"),
        (
            {"token_rewards": {"values": np.array([np.nan], "<f4").tobytes(), "runs": u4(4)}},
            "token_rewards holds values",
        ),
        ({"token_rewards": {"values": b"\x00" * 4, "runs": u4(2**32 - 1)}}, "cover 4294967295 tokens of 4"),
        ({"token_rewards": {"values": b"", "items": b"\x00\x00"}}, "items of token_rewards has 2 bytes"),
        ({"temperature": [-1.0]}, "temperature holds values that are negative"),
        ({"temperature": [math.nan]}, "temperature holds values that are negative"),
        ({"experts": {"values": b"", "shape": [2**62, 2**62]}}, "experts has the shape"),
        ({"experts": {"values": b"", "shape": [2]}}, "experts has the shape"),
        ({"experts": {"values": b"", "shape": [1, 2]}}, "experts has 0 bytes; 12 numbers"),
        ({"experts": {"values": np.full(6, -2, "<i2").tobytes(), "shape": [1, 1]}}, "-1 .not known. is the least"),
        ({"token_turns": {"values": b"", "shape": [1]}}, "token_turns has the shape"),
        ({"columns": {"of_the_future": [1]}}, "unknown field `of_the_future`"),
        ({"candidates": {"ids": u4(2), "lengths": u4(1, 0, 0)}}, "lengths of candidates has 12 bytes"),
        ({"candidates": {"ids": u4(2), "lengths": u4(2, 0, 0, 0)}}, "1 ids, but their lengths add up to 2"),
        ({"candidates": {"ids": b"123", "lengths": u4(0, 0, 0, 0)}}, "ids of candidates has 3 bytes"),
        ({"candidates": {"ids": u4(2**32 - 1), "lengths": u4(1, 0, 0, 0)}}, "ids from -1 to -1"),
        ({"candidates": {"ids": u4(3), "lengths": u4(1, 0, 0, 0)}}, "not among the candidates"),
        ({"candidates": {"ids": b"", "lengths": b"", "items": b"12"}}, "items of candidates has 2 bytes"),
        ({"untrainable_sampling": ["a", None]}, "1 items, but 2 of untrainable_sampling"),
        ({"version_runs": {"counts": u4(1), "versions": bytes(8), "lengths": u4(3)}}, "cover 3 tokens, but it has 4"),
        ({"version_runs": {"counts": u4(2**32 - 1), "versions": b"", "lengths": b""}}, "4294967295 version runs"),
        *(
            ({"images": {"files": [PICTURES[0].data], "spans": [[span]]}}, "outside its item")
            for span in ((0, 5, 2), (1, 0, 2), (0, 0, 0))
        ),
        ({"images": {"files": [], "spans": []}}, "1 items, but 0 of images"),
        ({"images": {"files": [b"no picture"], "spans": [[]]}}, "picture cannot be read"),
        ({"message_spans": [[(0, "user", 0, 5, 0, 5)]]}, "do not cover its 6 tokens once each"),
        ({"origins": origins(rollout_id=["r", "s"])}, "1 items, but 2 of rollout_id"),
        ({"origins": origins(rollout_id=[3])}, "origins of its items cannot be read: Expected `str"),
        ({"origins": origins(rollout_id="r")}, "origins of its items cannot be read: Expected `array"),
        ({"origins": origins(group_id=["x" * 1025])}, "length <= 1024"),
        ({"origins": origins(total_reward=["a lot"])}, "origins of its items cannot be read: Expected `float"),
        ({"origins": origins(segment=[None])}, "Expected `int`, got `None`"),
        ({"origins": origins(env_seed=[b"1"])}, "origins of its items cannot be read: Expected `int"),
        ({"origins": origins(truncated=[1])}, "Expected `bool`, got `int`"),
        ({"origins": origins(stop=["bored"])}, "Invalid enum value 'bored'"),
        ({"origins": origins(step_kind=["both"])}, "Invalid enum value 'both'"),
        ({"origins": origins(objective=[[1]])}, "origins of its items cannot be read"),
        ({"origins": msgspec.msgpack.encode([{}])}, "origins of its items cannot be read: Expected `object"),
        ({"origins": b"\x81\xaarollout_id\x91\xa1\xff"}, "cannot be read: 'utf-8'"),
        ({"origins": b"\x81\xa1z" + b"\x91" * 100_000}, "cannot be read"),
        ({"origins": b"\x80" + b"\x00" * (5 << 20)}, "bytes of meta"),
        ({"origins": b""}, "cannot be read"),
        ({"origins": {"rollout_id": ["r"]}}, "body of the group"),
        ({"origins": None}, "body of the group"),
        ({"metas": msgspec.msgpack.encode([])}, "1 items, but 0 metas"),
        ({"metas": msgspec.msgpack.encode([{"a": b"bytes"}])}, "holds a bytes"),
        ({"metas": msgspec.msgpack.encode([{"a": {1: 2}}])}, "keys that are not text"),
        ({"metas": msgspec.msgpack.encode([{"a": msgspec.msgpack.Ext(5, b"x")}])}, "holds a Ext"),
        ({"metas": b"\x91\x81\xa1a" + b"\x91" * 33 + b"\x01"}, "deeper than 32"),
        ({"metas": b"\x91\x81\xa1a" + b"\x91" * 100_000}, "cannot be read: maximum recursion"),
        ({"metas": b"\x91\x81\xa1a\xa1\xff"}, "cannot be read: 'utf-8'"),
        ({"metas": b"\x91\x81\xa1a" + b"\x90" * (5 << 20)}, "bytes of meta"),
        ({"lengths": [6]}, "body of the group"),
        ({"weights": None}, "body of the group"),
    ],
)
def test_a_group_that_breaks_a_promise_of_items_is_refused(changed, message):
    data = encode_group([plain_item()])
    assert decode_group(with_fields(data)), "unchanged it is read"
    with pytest.raises(UnreadableGroup, match=message):
        decode_group(with_fields(data, **changed))


def test_ids_beyond_the_vocabulary_are_refused_when_it_is_known():
    data = encode_group([plain_item(6)])  # ids 0 to 5
    assert decode_group(data, WireLimits(vocab_size=6))
    with pytest.raises(UnreadableGroup, match="0 to 4 are read"):
        decode_group(data, WireLimits(vocab_size=5))
    with pytest.raises(UnwritableGroup, match="from 0 to 5; a learner reads 0 to 4"):
        encode_group([plain_item(6)], limits=WireLimits(vocab_size=5))


def test_what_follows_the_message_is_refused():
    for compress in (False, True):
        with pytest.raises(UnreadableGroup):
            decode_group(encode_group([plain_item()], compress=compress) + b"\x00")


# --- optional parts ---

WITHOUT_ZSTD = """
import sys
sys.modules["zstandard"] = None  # as if it were not installed
from ludic_pipeline.queue.wire import UnreadableGroup, decode_group, encode_group
from ludic.types import MissingExtra, SAWItem
items = [SAWItem([1, 2], None, [0, 1], 1.0)]
assert len(decode_group(encode_group(items))) == 1
try:
    encode_group(items, compress=True)
except MissingExtra as error:
    assert "ludic-rl[pipeline]" in str(error)
else:
    raise AssertionError("compressed without zstd")
try:
    decode_group(bytes.fromhex(sys.argv[1]))
except UnreadableGroup as error:
    assert "ludic-rl[pipeline]" in str(error)
else:
    raise AssertionError("read without zstd")
"""


def test_without_zstd_plain_groups_work_and_compressed_ones_say_what_to_install():
    compressed = encode_group([plain_item()], compress=True)
    subprocess.run([sys.executable, "-c", WITHOUT_ZSTD, compressed.hex()], check=True)
