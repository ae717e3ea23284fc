"""The protocol between a pool of envs and the processes that hold them: msgpack frames over a stream socket.

A frame is a length of four bytes and a msgpack list of messages: calls in one direction, replies in the other. Each end sends the
messages of one tick of its event loop in one frame. Only plain data travels; nothing that arrives is turned into code.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from ludic.types import (
    ConfigError,
    EnvContractError,
    EnvWorkerError,
    Failure,
    LudicError,
    MissingExtra,
    ResetNeeded,
    SnapshotUnsupported,
    UnknownName,
)
from ludic.types.errors import encodable
from ludic.types.rollout import json_number

PROTOCOL = 1
"""Number of this protocol. Both ends must have the same."""
MAX_FRAME = 1 << 28
"""Bytes of a frame. An observation has at most a million characters."""
_READ_SIZE = 1 << 18
_LENGTH = struct.Struct(">I")
RETIRING = "retiring"
"""Value of a reply without a call: the worker takes no further envs and ends when those it holds are closed."""


class Call(msgspec.Struct, array_like=True):
    """A request to a worker."""

    id: int
    """Chosen by the caller; the reply has it."""
    env: int
    """Number of the env on this connection, chosen by the caller."""
    op: str
    """make, reset, step, tool or close."""
    value: Any = None


class Reply(msgspec.Struct, array_like=True):
    """The answer to one call."""

    id: int
    """0 in a notice of the worker, which answers no call."""
    value: Any = None
    error: list[str] | None = None
    """The fields of a `Failure`, if the call raised."""


# --- frames ---

_encoder = msgspec.msgpack.Encoder(enc_hook=json_number)
_plain_decoder = msgspec.msgpack.Decoder()


def pack(value: Any) -> bytes:
    """One value as a frame."""
    return _framed(_encoder.encode(value))


def _framed(body: bytes) -> bytes:
    if len(body) > MAX_FRAME:
        raise EnvContractError(
            f"A message of {len(body):,} bytes is too large for an env worker (limit: {MAX_FRAME:,})."
        )
    return _LENGTH.pack(len(body)) + body


class BadFrame(LudicError, ValueError):
    """The other end sends something that is not a frame of this protocol."""


class FrameReader:
    """Cuts a stream of bytes into frames and decodes them."""

    def __init__(self, decode: Callable[[Any], Any] = _plain_decoder.decode, *, max_frame: int = MAX_FRAME) -> None:
        self._decode = decode
        self._max_frame = max_frame
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The contents of the frames that `data` completes."""
        self._bytes += data
        found, start, end = [], 0, len(self._bytes)
        with memoryview(self._bytes) as view:
            while end - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > self._max_frame:
                    raise BadFrame(f"A frame of {length:,} bytes was announced; the limit is {self._max_frame:,}.")
                stop = start + _LENGTH.size + length
                if stop > end:
                    break
                try:
                    with view[start + _LENGTH.size : stop] as body:
                        found.append(self._decode(body))
                except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                    raise BadFrame(f"A frame cannot be read: {error}") from error
                start = stop
        del self._bytes[:start]
        return found


async def send_frame(sock: socket.socket, value: Any) -> None:
    """For a handshake, before a `Line` takes the socket."""
    await asyncio.get_running_loop().sock_sendall(sock, pack(value))


async def receive_frame(sock: socket.socket, *, max_frame: int = 1 << 16) -> Any:
    """The next frame of a handshake. Reads no byte behind it; EOFError if the other end closes."""
    loop = asyncio.get_running_loop()

    async def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = await loop.sock_recv(sock, count - len(data))
            if not got:
                raise EOFError("The connection was closed.")
            data += got
        return data

    (length,) = _LENGTH.unpack(await exactly(_LENGTH.size))
    if length > max_frame:
        raise BadFrame(f"A frame of {length:,} bytes was announced; the limit is {max_frame:,}.")
    try:
        return _plain_decoder.decode(await exactly(length))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(f"A frame cannot be read: {error}") from error


class Line:
    """One end of a connection, served by the running event loop."""

    def __init__(
        self,
        sock: socket.socket,
        message: type[Call] | type[Reply],
        *,
        on_messages: Callable[[list[Any]], None],
        on_lost: Callable[[str], None],
        on_unsendable: Callable[[Any, Exception], Any],
    ) -> None:
        """`message`: what arrives here. `on_unsendable` gets a message that is not plain data, and returns one to send instead, or
        None."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[message])  # type: ignore[valid-type]
        self._reader = FrameReader(decoder.decode)
        self._on_messages, self._on_lost, self._on_unsendable = on_messages, on_lost, on_unsendable
        self._outbox: list[Any] = []
        self._unsent = bytearray()
        self.is_open = True
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, message: Any) -> None:
        """Send with the other messages of this tick."""
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(message)

    def flush(self) -> None:
        """Send what waits now."""
        if not self._outbox or not self.is_open:
            return
        outbox, self._outbox = self._outbox, []
        frames = self._packed(outbox)
        if self._unsent:
            self._unsent += frames
        else:
            self._write(frames)

    def _packed(self, messages: list[Any]) -> bytes:
        try:
            body = _encoder.encode(messages)
            if len(body) <= MAX_FRAME // 2 or len(messages) == 1:
                return _framed(body)
        except Exception as error:  # noqa: BLE001 - an env may return anything
            if len(messages) == 1:
                return self._packed_alone(messages[0], error)
        half = len(messages) // 2
        return self._packed(messages[:half]) + self._packed(messages[half:])

    def _packed_alone(self, message: Any, error: Exception) -> bytes:
        if isinstance(error, UnicodeEncodeError):
            message.value = _encodable(message.value)
            try:
                return pack([message])
            except Exception as second:  # noqa: BLE001 - an env may return anything
                error = second
        instead = self._on_unsendable(message, error)
        return b"" if instead is None else pack([instead])

    def _write(self, data: bytes) -> None:
        sent = self._sent(data)
        if sent is not None and sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._sock.fileno(), self._write_rest)

    def _write_rest(self) -> None:
        sent = self._sent(self._unsent)
        if sent is not None:
            del self._unsent[:sent]
            if not self._unsent:
                self._loop.remove_writer(self._sock.fileno())

    def _sent(self, data: bytes | bytearray) -> int | None:
        """Bytes that the socket took; None if the connection is lost."""
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._lose(str(error))
            return None

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("")
            return
        try:
            frames = self._reader.feed(data)
        except BadFrame as error:
            self._lose(str(error))
            return
        for messages in frames:
            if self.is_open:
                self._on_messages(messages)

    def _lose(self, why: str) -> None:
        if self.is_open:
            self.close()
            self._on_lost(why)

    def close(self) -> None:
        """Close the socket; `on_lost` is not called. Also works after the event loop has ended."""
        if not self.is_open:
            return
        self.is_open = False
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError, ValueError, OSError):  # the loop may be ending in another thread
                self._loop.remove_reader(self._sock.fileno())
                self._loop.remove_writer(self._sock.fileno())
        self._sock.close()


def _encodable(value: Any) -> Any:
    """Plain data whose texts have no lone surrogates, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


# --- errors ---

_OURS: dict[str, type[LudicError]] = {
    kind.__name__: kind
    for kind in (ConfigError, EnvContractError, MissingExtra, ResetNeeded, SnapshotUnsupported, UnknownName)
}
"""Errors that arrive as the type that was raised: callers handle them."""
_SENT = ("error", "message", "traceback", "user_traceback", "place")
"""Fields of a `Failure` that a worker sends; another change of them needs another PROTOCOL."""


def error_to_wire(error: BaseException) -> list[str]:
    failure = Failure.from_exception(error)
    ours = next((name for name, kind in _OURS.items() if isinstance(error, kind)), "")
    return [*(getattr(failure, name) for name in _SENT), ours]


def error_from_wire(stored: list[str]) -> LudicError:
    """The error that a worker sent: one of Ludic's as itself, any other as an EnvWorkerError that holds its `Failure`."""
    kind_of_error, message, traceback, user_traceback, place, ours = stored
    failure = Failure(
        error=kind_of_error, message=message, traceback=traceback, user_traceback=user_traceback, place=place
    )
    kind = _OURS.get(ours)
    if kind is None:
        return EnvWorkerError(failure)
    error = kind.__new__(kind)  # MissingExtra takes other arguments than a message
    Exception.__init__(error, failure.message)
    return error
