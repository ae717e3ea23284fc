"""Frames of env workers: any cut of the stream gives the same messages, and what is no frame is refused."""

import asyncio
import random
import socket
import struct
import types

import msgspec
import pytest

from ludic.types import ConfigError, EnvWorkerError, Failure, MissingExtra, ResetNeeded, UnknownName
from ludic_envs.workers.process import Connection
from ludic_envs.workers.wire import (
    BadFrame,
    Call,
    FrameReader,
    Line,
    Reply,
    error_from_wire,
    error_to_wire,
    pack,
)

VALUES = [None, 1, "text ü", {"a": [1.5, {"b": True}]}, b"bytes", "x" * 70_000]


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_read_however_the_stream_is_cut(seed: int):
    rng, stream, reader, found = random.Random(seed), b"".join(map(pack, VALUES)), FrameReader(), []
    while stream:
        size = rng.choice([1, 3, 5, 100, 50_000])
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == VALUES


@pytest.mark.parametrize(
    "data", [struct.pack(">I", 1 << 31), b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1) + b"\xc1", pack("x" * 9)]
)
def test_what_is_no_frame_is_refused(data: bytes):
    decoder = msgspec.msgpack.Decoder(list[Call])
    with pytest.raises(BadFrame):
        FrameReader(decoder.decode).feed(data)


def test_a_ludic_error_arrives_as_itself_and_any_other_with_the_failure_of_its_process():
    for raised in (ConfigError("wrong"), ResetNeeded("reset first"), UnknownName.among("env", "x", ["y"])):
        error = error_from_wire(error_to_wire(raised))
        assert type(error) is type(raised) and str(error) == str(raised)
    extra = MissingExtra("math", "Grading")
    assert str(error_from_wire(error_to_wire(extra))) == str(extra)
    try:
        {}["key"]
    except KeyError as raised:
        failure, error = Failure.from_exception(raised), error_from_wire(error_to_wire(raised))
    assert isinstance(error, EnvWorkerError) and Failure.from_exception(error) == failure


class Ends:
    """Two ends of a connection in one event loop."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.lost: list[str] = []
        unsendable = {"on_unsendable": lambda message, error: Reply(message.id, None, ["unsendable"])}
        self.pool = Line(here, Reply, on_messages=self.replies.extend, on_lost=self.lost.append, **unsendable)
        self.worker = Line(there, Call, on_messages=self.calls.extend, on_lost=self.lost.append, **unsendable)


async def until(is_true) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0)


async def test_messages_of_one_tick_travel_together_and_in_order():
    ends, frames = Ends(), []
    ends.worker._on_messages = frames.append
    for number in range(100):
        ends.pool.send(Call(number, 1, "step", {"a": "b"}))
    await until(lambda: frames)
    assert [[call.id for call in frame] for frame in frames] == [list(range(100))]
    ends.pool.close()
    ends.worker.close()


async def test_a_message_larger_than_the_socket_takes_arrives_whole():
    ends = Ends()
    ends.pool.send(Call(1, 1, "step", "x" * 5_000_000))
    ends.pool.send(Call(2, 1, "step", "y"))
    await until(lambda: len(ends.calls) == 2)
    assert [len(call.value) for call in ends.calls] == [5_000_000, 1]
    ends.pool.close()
    await until(lambda: ends.lost)  # the other end notices
    assert not ends.worker.is_open


async def test_an_unsendable_message_is_replaced_and_its_neighbours_arrive():
    ends = Ends()
    for id, value in ((1, "a"), (2, object()), (3, "lone \ud800"), (4, "d")):
        ends.worker.send(Reply(id, value))
    await until(lambda: len(ends.replies) == 4)
    assert [(r.id, r.value, r.error) for r in ends.replies] == [
        (1, "a", None), (2, None, ["unsendable"]), (3, "lone ?", None), (4, "d", None),
    ]  # fmt: skip
    ends.pool.close()
    ends.worker.close()


async def test_garbage_closes_the_line():
    here, there = socket.socketpair()
    lost: list[str] = []
    Line(here, Reply, on_messages=pytest.fail, on_lost=lost.append, on_unsendable=lambda m, e: None)
    there.sendall(struct.pack(">I", 1 << 30))
    await until(lambda: lost)
    assert "limit" in lost[0]
    there.close()


@pytest.mark.parametrize("value", [None, [], "counter", ["counter", {}], ["counter", None, False], {"counter": 1}])
async def test_a_make_that_names_no_env_is_answered_with_an_error(value):
    here, there = socket.socketpair()
    replies: list[Reply] = []
    worker = types.SimpleNamespace(is_retiring=False, factories={}, tasks=set(), connections=set(), in_threads=False)
    connection = Connection(there, worker)
    line = Line(here, Reply, on_messages=replies.extend, on_lost=pytest.fail, on_unsendable=pytest.fail)
    line.send(Call(1, 1, "make", value))
    line.send(Call(2, 1, "reset", None))
    await until(lambda: len(replies) == 2)
    texts = {reply.id: str(error_from_wire(reply.error)) for reply in replies}
    assert "make takes a name" in texts[1] and "has no env 1" in texts[2]
    line.close()
    await connection.close()
