"""Files on disk: atomic replacement, files of JSON lines that are appended to while they are read; and texts of other authors.

Checkpoints, exports and published weights use the first; rollouts (`ludic.types.rollout_files`, `ludic.batch_gen.store`) the
second, which `ludic.util.line_writer` writes. A file of lines is plain text, or gzip if its name ends in .gz: gzip members of about
256 KiB of text. Each append extends the last member and closes it again, so the file is complete between two appends, `zcat` reads
it at any time, and a line can be found without reading the members before it. Of a damaged member only its own lines are lost:
readers continue at the next.
"""

import fcntl
import json
import logging
import os
import shutil
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from ludic.util.errors import LudicError

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
"""Prefix of a file or folder while it is written. A killed writer leaves it behind; the next one removes it."""

MAX_LINE_BYTES = 1 << 26
"""Longest line that readers take: a compressed file of 1 MB can hold one of 1 GB."""
GZIP_LEVEL = 6
_BLOCK = 1 << 20
"""More than a member has, so that its checksum is verified before one of its lines is returned."""
_PIECE = 1 << 22
"""Text that is decompressed at once."""
_MAX_DAMAGED = 100
"""Members of one file without an end, behind which no more is looked for: any ten bytes may look like the start of one."""
_GZIP = 16 + zlib.MAX_WBITS
MEMBER_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class NotWritten(LudicError, OSError):
    """A file cannot be written; the message says why and what to do."""

    advice: ClassVar[str] = "free some, or choose another disk (ludic train: --runs)"
    """Advice where the room is too little."""

    @classmethod
    def of(cls, path: Path, error: Exception, state: str = "") -> Self:
        """`state`: a sentence about what is intact."""
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        made = cls(
            f"Could not write {path}: {type(error).__name__}: {error}. {state}{free:.0f} MiB are free there: if that is too "
            f"little, {cls.advice}."
        )
        made.errno = getattr(error, "errno", None)
        return made


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to: after the block the file is synced and renamed to `path`, in one step."""
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    yield unfinished
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by the JSON text of `value`, in one step."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk and survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- files of lines: writing ------------------------------------------------------------------------------------


def is_compressed(path: Path) -> bool:
    return path.suffix == ".gz"


# --- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """The position of one line."""

    path: Path
    offset: int
    """In the file; for a compressed file, in the text of its member."""
    length: int
    member: int | None = None
    """Offset of the gzip member that holds it."""

    def read(self) -> bytes:
        if self.member is None:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(self.length)
        stat = self.path.stat()
        text = _member_text(self.path, self.member, stat.st_size, stat.st_mtime_ns)
        return text.read(self.offset, min(self.length, MAX_LINE_BYTES))


def read_lines(
    path: str | Path, *, start: int = 0, skip: int = 0, longest: int = MAX_LINE_BYTES
) -> Iterator[tuple[Line, bytes]]:
    """Every complete line, also of a file that is being written; an interrupted write at the end is left out.

    `start`: where to begin, the offset of a line; in a compressed file, of a member, of whose text `skip` bytes are left out. A
    longer line is cut after `longest` bytes, so it no longer parses as JSON.
    """
    path = Path(path)
    with path.open("rb") as file:
        file.seek(start)
        whole = [_StoredMember(start, iter(partial(file.read, _BLOCK), b""))]
        for member in _members(file) if is_compressed(path) else whole:
            number, offset = (member.start, 0) if is_compressed(path) else (None, start)
            if member.start == start and skip:
                offset, member.text = skip, _behind(member.text, skip)
            for line, length in _split(member.text, longest):
                if line.endswith(b"\n") or _is_json(line):
                    yield Line(path, offset, length, number), line
                offset += length


def _behind(text: Iterator[bytes], skip: int) -> Iterator[bytes]:
    for piece in text:
        if skip < len(piece):
            yield piece[skip:]
        skip = max(0, skip - len(piece))


def _split(text: Iterator[bytes], longest: int = MAX_LINE_BYTES) -> Iterator[tuple[bytes, int]]:
    """The lines of a text that arrives in pieces, at most `longest` bytes of each, and how long they are."""
    begun, length = b"", 0
    for piece in text:
        place = 0
        while (end := piece.find(b"\n", place)) >= 0:
            yield begun + piece[place : min(end, place + longest - len(begun))] + b"\n", length + end - place + 1
            begun, length, place = b"", 0, end + 1
        begun, length = begun + piece[place : place + longest - len(begun)], length + len(piece) - place
    if begun:
        yield begun, length


@dataclass(slots=True)
class _StoredMember:
    """A gzip member that is being read; the fields after `text` are known once it has been read. A member that is neither
    whole nor damaged is still being written, or its writer was killed."""

    start: int
    text: Iterator[bytes]
    size: int = 0
    is_whole: bool = False
    is_damaged: bool = False
    rest: bytes = b""
    """Bytes of the next member that were already read."""


def _members(file: IO[bytes]) -> Iterator[_StoredMember]:
    """All members; the text of each must be read before the next is requested. After an incomplete one, continues at the next,
    `_MAX_DAMAGED` times."""
    start, block, num_damaged = file.tell(), file.read(_BLOCK), 0
    while block and num_damaged <= _MAX_DAMAGED:
        member = _StoredMember(start, iter(()))
        member.text = _inflated(file, block, member)
        yield member
        if member.is_whole:
            start, block = start + member.size, member.rest or file.read(_BLOCK)
        else:
            num_damaged += 1
            start = _next_member(file, start + 1)
            block = file.read(_BLOCK)


def _next_member(file: IO[bytes], place: int) -> int:
    """Offset of the first member of a LineWriter after `place`; leaves the file positioned there, or at its end."""
    overlap = len(MEMBER_HEADER) - 1
    while True:
        file.seek(place)
        block = file.read(_BLOCK)
        found = block.find(MEMBER_HEADER)
        if found >= 0:
            return file.seek(place + found)
        if len(block) <= overlap:
            return file.seek(0, os.SEEK_END)
        place += len(block) - overlap


def _inflated(file: IO[bytes], block: bytes, member: _StoredMember) -> Iterator[bytes]:
    inflate = zlib.decompressobj(_GZIP)
    is_readable = block.startswith(MEMBER_HEADER[: len(block)])  # or written by other programs, and has text
    while not inflate.eof and (block := block or file.read(_BLOCK)):
        try:
            text = inflate.decompress(block, _PIECE)
        except zlib.error as error:
            # None of its lines can be trusted: an error shows only after the damaged byte.
            member.is_damaged = True
            logger.warning("%s is damaged behind byte %d; lines there are left out: %s", file.name, member.start, error)
            return
        member.size += len(block) - len(inflate.unconsumed_tail)
        block = inflate.unconsumed_tail
        if text:
            is_readable = True
            yield text
    member.is_whole, member.rest = inflate.eof, inflate.unused_data
    if not member.is_whole and not is_readable:  # a wrong bit of the header can promise more than there is
        member.is_damaged = True
        logger.warning("%s is damaged behind byte %d; lines there are left out.", file.name, member.start)
    member.size -= len(member.rest)


class _MemberText:
    """The text of a gzip member. Other programs make a file one member: no more than a piece of it is held, and for each piece
    the decompressor that continues there."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._places = {0: (start, zlib.decompressobj(_GZIP))}
        """Offset of a piece in the text → its offset in the file, and the decompressor."""
        self._last = (-1, b"")

    def read(self, offset: int, length: int) -> bytes:
        found, begin = b"", max(known for known in list(self._places) if known <= offset)
        while begin < offset + length and (piece := self._piece(begin)):
            found += piece[max(0, offset - begin) : offset + length - begin]
            begin += len(piece)
        return found

    def _piece(self, begin: int) -> bytes:
        known, text = self._last
        if known == begin:
            return text
        place, inflate = self._places[begin]
        inflate, piece = inflate.copy(), bytearray()
        with self._path.open("rb") as file:
            file.seek(place)
            try:
                while len(piece) < _PIECE and not inflate.eof and (block := file.read(_PIECE >> 10)):
                    piece += inflate.decompress(block)  # deflate makes at most 1,032 bytes of one
            except zlib.error:
                return b""
            self._places[begin + len(piece)] = (file.tell(), inflate)
        self._last = (begin, bytes(piece))
        return self._last[1]


@lru_cache(maxsize=8)
def _member_text(path: Path, start: int, size: int, mtime_ns: int) -> _MemberText:
    """Cached, since lines are usually read one after the other; `size` and `mtime_ns` detect a change."""
    return _MemberText(path, start)


# --- repairing --------------------------------------------------------------------------------------------------


def repair(path: Path) -> None:
    """Remove the partial line of a killed process, so that the next lines are not appended to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if is_compressed(path):
            _repair_compressed(file)
        else:
            _repair_plain(file)


def _repair_compressed(file: IO[bytes]) -> None:
    """Rewrite a last member without an end, keeping its complete lines. A damaged one stays as it is."""
    for member in _members(file):
        lines = [line for line, _ in _split(member.text) if line.endswith(b"\n") or _is_json(line)]
    if member.is_whole or member.is_damaged:
        return
    logger.warning("%s ends in the middle of a write; %d lines of its last part are kept.", file.name, len(lines))
    text = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    file.seek(member.start)
    file.write(zlib.compress(text, GZIP_LEVEL, _GZIP) if text else b"")
    file.truncate()


def _repair_plain(file: IO[bytes]) -> None:
    start = _start_of_last_line(file, file.seek(0, os.SEEK_END))
    file.seek(start)
    tail = file.read()
    if tail.endswith(b"\n"):
        return
    if _is_json(tail):
        file.write(b"\n")
    else:
        logger.warning("%s ends in the middle of a line; its last %d bytes are cut off.", file.name, len(tail))
        file.truncate(start)


def _start_of_last_line(file: IO[bytes], end: int) -> int:
    """Offset of the last line: just after the last newline before the final byte."""
    position = end - 1
    while position > 0:
        start = max(0, position - _BLOCK)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


# --- JSON and TOML of another author: whatever is wrong with it, a ValueError; Python's parsers raise RecursionError as well ---


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text; `options` are those of `json.loads`."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("the TOML is nested too deeply") from None
