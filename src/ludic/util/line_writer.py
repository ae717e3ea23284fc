"""Appends to files of lines, plain or compressed, that others read meanwhile (`ludic.util.files.read_lines`)."""

import fcntl
import os
import struct
import zlib
from pathlib import Path
from typing import IO

from ludic.util.files import GZIP_LEVEL, MEMBER_HEADER, NotWritten, is_compressed, repair

MEMBER_BYTES = 1 << 18
"""Bytes of text after which a new gzip member begins: larger compresses better, but finding a line takes longer."""
_LAST_BLOCK = b"\x03\x00"  # an empty deflate block that ends the stream; what comes before it ends at a whole byte


class LineWriter:
    """Appends lines. Several writers, also of several processes, may take turns on one file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._is_ready = False
        self._member: _Member | None = None

    def append(self, lines: bytes) -> None:
        """The lines are in the file when it returns. A killed writer leaves some of them, and a partial one that readers skip."""
        try:
            if not self._is_ready:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                repair(self.path)
                self._is_ready = True
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "rb+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                self._write(file, lines)
        except BaseException as error:
            self._is_ready, self._member = False, None  # a full disk may hold a part
            if isinstance(error, OSError):
                raise NotWritten.of(self.path, error) from error
            raise

    def _write(self, file: IO[bytes], lines: bytes) -> None:
        size = os.fstat(file.fileno()).st_size
        if not is_compressed(self.path):
            _write_at(file, size, lines)
            return
        if self._member is None or self._member.end != size or self._member.num_bytes >= MEMBER_BYTES:
            self._member = _Member(start=size)
        self._member.extend(file, lines)


class _Member:
    """The gzip member that a writer extends."""

    def __init__(self, start: int) -> None:
        self._deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc = 0
        self._place = start
        """Position of the next bytes: after the last block, over the end of the member."""
        self._pending = MEMBER_HEADER
        self.num_bytes = 0
        self.end = start
        """Size of the file after the last append; another size means that another writer has appended."""

    def extend(self, file: IO[bytes], lines: bytes) -> None:
        self.num_bytes += len(lines)
        self._crc = zlib.crc32(lines, self._crc)
        blocks = self._pending + self._deflate.compress(lines) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        end = _LAST_BLOCK + struct.pack("<II", self._crc, self.num_bytes & 0xFFFFFFFF)
        # The old end is removed first: after an interrupted write its bytes would be read as text.
        os.ftruncate(file.fileno(), self._place)
        _write_at(file, self._place, blocks + end)
        self._pending = b""
        self._place += len(blocks)
        self.end = self._place + len(end)


def _write_at(file: IO[bytes], place: int, data: bytes) -> None:
    while data:
        written = os.pwrite(file.fileno(), data, place)
        data, place = data[written:], place + written
