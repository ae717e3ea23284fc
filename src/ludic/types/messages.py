"""Chat messages and the pictures in them: plain dictionaries in the OpenAI shape, never changed once they are in a conversation.

A message's content is text, or a list of parts: texts and pictures. A picture is a part with a data URL, so that it goes through
every file and connection as JSON does; `Image` makes such parts and reads them.
"""

import base64
import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ludic.types.errors import ConfigError, encodable

MAX_IMAGE_BYTES = 1 << 25
"""Limit of a picture's file: 32 MiB."""

JSON: TypeAlias = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None

Message: TypeAlias = dict[str, Any]
"""`role` and `content`; tool messages add `tool_call_id` and `name`, assistant messages may add `tool_calls`."""

Part: TypeAlias = dict[str, Any]
"""`{"type": "text", "text": …}` or `{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}`."""
Content: TypeAlias = str | list[Part]
"""Content of a message or an observation: text, or texts and pictures in their order."""

ToolCall: TypeAlias = dict[str, Any]
"""`{"id", "type": "function", "function": {"name", "arguments": <JSON string>}}`."""


class MessageView(Sequence[Message]):
    """The first `length` messages of an append-only list, without copying it.

    Every model call of a conversation stores its prompt this way, so a rollout's memory is linear in its turns.
    """

    __slots__ = ("_length", "_log")

    def __init__(self, log: list[Message], length: int | None = None) -> None:
        self._log = log
        self._length = len(log) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return self._log[: self._length][index]
        if not -self._length <= index < self._length:
            raise IndexError(f"message {index} of {self._length}")
        return self._log[index % self._length]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._log[: self._length])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (MessageView, list, tuple)):
            return len(self) == len(other) and list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


# --- pictures ---
class MessageSpan(NamedTuple):
    """Consecutive tokens of a prompt or sample that came from one message, with the template's tokens around its text.

    The spans of a prompt follow each other without gaps, so every token is in exactly one.
    """

    message: int
    """Position of the message in the conversation. -1: tokens that the template writes for no message (a header of tools)."""
    role: str
    """Role of the message; `TEMPLATE` where there is none. The opening of a reply belongs to the reply's message."""
    start: int
    end: int
    """The first token behind the span."""
    text_start: int
    """Tokens of the message's own text; the whole span where the text could not be located."""
    text_end: int

    def moved(self, by: int) -> "MessageSpan":
        """The same span, `by` tokens further on."""
        return self._replace(
            start=self.start + by, end=self.end + by, text_start=self.text_start + by, text_end=self.text_end + by
        )


TEMPLATE = "template"
"""Role of the tokens that belong to no message."""


def joined_spans(spans: Iterable[MessageSpan]) -> list[MessageSpan]:
    """The spans with neighbours of the same message joined; empty spans are left out."""
    joined: list[MessageSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if not joined or joined[-1].message != span.message:
            joined.append(span)
            continue
        before = joined[-1]
        texts = [part for part in (before, span) if part.text_start < part.text_end] or [before]
        joined[-1] = before._replace(end=span.end, text_start=texts[0].text_start, text_end=texts[-1].text_end)
    return joined


def spans_with_reply(spans: Sequence[MessageSpan], num_tokens: int) -> list[MessageSpan]:
    """The spans of a prompt and of the `num_tokens` sampled after it, which are the text of the reply that the prompt opens."""
    last = spans[-1]
    is_open = last.role == "assistant" and last.text_start == last.text_end
    reply = MessageSpan(
        message=last.message if is_open else last.message + 1,
        role="assistant",
        start=last.end,
        end=last.end + num_tokens,
        text_start=last.end,
        text_end=last.end + num_tokens,
    )
    return joined_spans([*spans, reply])


_MAGIC = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}


@dataclass(frozen=True, slots=True)
class Image:
    """A picture as the bytes of a PNG or JPEG file. Equal bytes are equal pictures."""

    data: bytes
    media_type: str
    sha256: str
    """Hash of the bytes, in hex; identifies the picture in traces and caches."""

    @classmethod
    def of(cls, source: "Image | bytes | str | Path | npt.NDArray[Any] | Any") -> "Image":
        """Reads a file's path or bytes (PNG or JPEG), an array [height, width] or [height, width, 3] of uint8, or a PIL image."""
        if isinstance(source, Image):
            return source
        if isinstance(source, (str, Path)):
            try:
                source = Path(source).read_bytes()
            except OSError as error:
                raise ConfigError(f"The picture {str(source)!r:.200} cannot be read: {error.strerror}.") from error
        elif hasattr(source, "convert"):  # a PIL image, which this package does not import
            source = np.asarray(source.convert("RGB"))
        if isinstance(source, np.ndarray):
            source = _png(source)
        if not isinstance(source, bytes):
            raise ConfigError(
                f"A picture cannot be made of {type(source).__name__}; give a path, the bytes of a PNG or JPEG file, a uint8 array "
                "or a PIL image."
            )
        if len(source) > MAX_IMAGE_BYTES:
            raise ConfigError(
                f"A picture of {len(source):,} bytes is too large (limit: {MAX_IMAGE_BYTES:,}). Scale it down."
            )
        kind = next((name for name, magic in _MAGIC.items() if source.startswith(magic)), None)
        if kind is None:
            raise ConfigError(f"A picture is the bytes of a PNG or JPEG file; these begin with {source[:8]!r}.")
        return cls(source, kind, hashlib.sha256(source).hexdigest())

    def part(self) -> Part:
        """The picture as a part of a message's content, or of an observation."""
        return {"type": "image_url", "image_url": {"url": self.url}}

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def __repr__(self) -> str:
        return f"Image({self.media_type}, {len(self.data)} bytes, sha256={self.sha256[:12]}…)"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """A picture in a prompt, and the tokens that stand for it."""

    image: Image
    start: int
    """Position of its first token."""
    length: int
    """Number of its tokens."""

    @property
    def end(self) -> int:
        return self.start + self.length

    def moved(self, offset: int) -> "ImageSpan":
        """The same picture `offset` tokens further."""
        return ImageSpan(self.image, self.start + offset, self.length)


@lru_cache(maxsize=256)
def image_of_url(url: str) -> Image:
    """The picture in a data URL; equal URLs are read once."""
    _, _, body = url.partition(";base64,")
    if not url.startswith("data:image/") or not body:
        raise ConfigError(
            f"A picture in a message is a data URL, data:image/png;base64,…; this one is {url!r:.80}. Make the part with "
            "Image.of(…).part()."
        )
    try:
        return Image.of(base64.b64decode(body, validate=True))
    except ValueError as error:
        raise ConfigError(f"The data URL of a picture cannot be read: {error}.") from error


def content_of(*pieces: "str | Image") -> list[Part]:
    """The content of a message, or an observation, with pictures: texts and pictures in their order."""
    return [piece.part() if isinstance(piece, Image) else {"type": "text", "text": piece} for piece in pieces]


def is_picture(part: Part) -> bool:
    return part.get("type") == "image_url"


def plain_content(content: object) -> Content:
    """The content as plain types that later changes of the given object do not reach; ValueError if it is none."""
    if isinstance(content, str):
        is_plain = type(content) is str and content.isascii()
        return content if is_plain else encodable(str.__str__(content))
    if not isinstance(content, list):
        raise ValueError(f"it is a {type(content).__name__}; an observation is text, or content_of(text, picture, …)")
    return [_plain_part(part) for part in content]


def _plain_part(part: object) -> Part:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": encodable(part["text"])}
    if isinstance(part, dict) and is_picture(part) and isinstance(found := part.get("image_url"), dict):
        return image_of_url(str(found.get("url"))).part()
    raise ValueError(f"{part!r:.80} is neither a text nor a picture; make parts with content_of(text, picture, …)")


def images_in(messages: Iterable[Message]) -> list[Image]:
    """The pictures of these messages, in order."""
    lists = (content for message in messages if type(content := message.get("content")) is list)
    return [image_of_url(part["image_url"]["url"]) for parts in lists for part in parts if is_picture(part)]


def text_of(content: Content | None) -> str:
    """The content as text; pictures are shown by the beginning of their hash."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        f"[picture {image_of_url(part['image_url']['url']).sha256[:12]}]" if is_picture(part) else part.get("text", "")
        for part in content
    )


def joined(contents: Sequence[Content]) -> Content:
    """Several contents as one, with an empty line between texts. Empty ones are left out."""
    kept = [content for content in contents if content]
    if len(kept) == 1:
        return kept[0]
    parts: list[Part] = []
    for content in kept:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and part.get("type") == "text" and parts[-1].get("type") == "text":
                parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}\n\n{part['text']}"}
            else:
                parts.append(part)
    is_text = all(isinstance(content, str) for content in kept)
    return "\n\n".join(map(str, kept)) if is_text else parts


Pictures: TypeAlias = dict[str, str]
"""Data URLs by the names that stand for them in a file."""


def name_pictures(content: Any, table: Pictures) -> Any:
    """The content with the hash of each picture in place of its data URL, which is put into `table`."""
    if type(content) is not list:
        return content
    return [_named(part, table) if type(part) is dict and is_picture(part) else part for part in content]


def _named(part: Part, table: Pictures) -> Part:
    url = part["image_url"]["url"]
    name = f"sha256:{image_of_url(url).sha256}"
    table[name] = url
    return {**part, "image_url": {"url": name}}


def restore_pictures(content: Any, table: Pictures) -> Any:
    """The inverse of `name_pictures`."""
    if type(content) is not list or not table:
        return content
    return [
        {**part, "image_url": {"url": table.get(part["image_url"]["url"], part["image_url"]["url"])}}
        if type(part) is dict and is_picture(part)
        else part
        for part in content
    ]


def _png(pixels: npt.NDArray[Any]) -> bytes:
    """The file of an array [height, width] (grey) or [height, width, 3] of uint8: the same bytes on every machine."""
    grey = pixels.ndim == 2
    if pixels.dtype != np.uint8 or not (grey or (pixels.ndim == 3 and pixels.shape[2] == 3)) or 0 in pixels.shape:
        raise ConfigError(
            f"A picture from an array needs uint8 of [height, width] or [height, width, 3]; this is {pixels.dtype} of "
            f"{list(pixels.shape)}."
        )
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    unfiltered = np.concatenate([np.zeros((height, 1), dtype=np.uint8), rows], axis=1)  # filter type 0 before every row

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if grey else 2, 0, 0, 0)
    body = zlib.compress(unfiltered.tobytes(), 6)
    return _MAGIC["image/png"] + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# --- texts ---

_LATEX = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""An opening box (also with a doubled backslash, as models write it in JSON), an escape such as `\\{`, a plain brace."""


def extract_last_boxed_content(raw: str) -> str | None:
    r"""The text inside the last well-formed `\boxed{…}` or `\fbox{…}`, without surrounding whitespace.

    Braces may nest, escaped ones do not count, an unclosed box is skipped. None if there is no box. Takes linear time, also for
    a reply full of unclosed boxes. Parsers (replies) and envs (reference solutions) both use it.

    >>> extract_last_boxed_content(r"First \boxed{1}, no: \boxed{\frac{3}{2}}.")
    '\\frac{3}{2}'
    """
    if "box" not in raw:
        return None
    open_groups: list[int | None] = []  # where the content of an open box begins; None for a plain brace
    last: tuple[int, int] | None = None
    for token in _LATEX.finditer(raw):
        if token["box"]:
            open_groups.append(token.end())
        elif token["open"]:
            open_groups.append(None)
        elif token["close"] and open_groups:
            start = open_groups.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else raw[last[0] : last[1]].strip()
