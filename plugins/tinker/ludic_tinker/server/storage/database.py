"""A SQLite database of the server, in WAL mode: what was written survives `kill -9`, and with `sync` a power cut as well.

SQLite leaves out what a killed process did not commit. It also takes a log with a changed byte to end there, and a log that is
gone to be empty, although what they held was acknowledged; both are found here when a database is opened.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludic.util.files import NotWritten

_PAGE_BYTES = 4096
_LOG_HEADER_BYTES = 32
_FRAME_BYTES = 24 + _PAGE_BYTES
"""A page in the log; bytes 4 to 8 of it are not zero where a transaction ends."""
_OPEN = 1
"""`user_version` of a database that a server has open, or had when it was killed: it has a log."""
_NOT_DAMAGE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_TOOBIG,
}
"""Errors of the disk or of one statement, by which nothing in the file has changed."""


class StorageError(NotWritten):
    """The data folder cannot be written or read; the message says why and what to do."""

    advice = "free some, for example by deleting checkpoints"


class Damaged(StorageError):
    """A file does not hold what was written."""


class Database:
    """One file of tables. Thread-safe; no other process opens it."""

    def __init__(self, path: Path, schema: str | None = None, *, sync: bool = False) -> None:
        """`schema` makes the tables of a new file; without it the file must have them. `sync`: each commit waits for the disk."""
        self.path, self.log = path, path.with_name(f"{path.name}-wal")
        self._lock = threading.RLock()
        had_log = self.log.exists()
        self._connection = sqlite3.connect(path, check_same_thread=False)
        try:
            with self._explained():
                self._configure(sync)
                [[version]] = self._connection.execute("PRAGMA user_version")
                self._check(version, had_log)
                self._make_tables(schema, version)
        except BaseException:
            self._connection.close()
            raise

    def _configure(self, sync: bool) -> None:
        for setting in (
            f"page_size={_PAGE_BYTES}",
            "locking_mode=EXCLUSIVE",  # so that no memory is shared with other processes
            "journal_mode=WAL",
            "wal_autocheckpoint=0",  # a log that only grows until it is emptied can be checked
            f"synchronous={'FULL' if sync else 'NORMAL'}",
        ):
            self._connection.execute(f"PRAGMA {setting}")

    def _check(self, version: int, had_log: bool) -> None:
        if version == _OPEN and not had_log:
            raise Damaged(f"{self.path} has lost its log {self.log.name}, which held what was written last.")
        [[_, num_frames, _]] = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if self._has_commit_after(num_frames):
            raise Damaged(f"{self.log} is damaged at byte {_LOG_HEADER_BYTES + num_frames * _FRAME_BYTES}.")
        problems = [text for (text,) in self._connection.execute("PRAGMA integrity_check(1)")]
        if problems != ["ok"]:
            raise Damaged(f"{self.path} is damaged: {problems[0]}.")

    def _has_commit_after(self, num_frames: int) -> bool:
        """True if a transaction ends behind the frames that SQLite could read; what a killed process leaves has no end."""
        frames = range(max(0, num_frames), (self.log_bytes() - _LOG_HEADER_BYTES) // _FRAME_BYTES)
        if not frames:
            return False
        with self.log.open("rb") as log:
            for frame in frames:
                log.seek(_LOG_HEADER_BYTES + frame * _FRAME_BYTES + 4)
                if any(log.read(4)):
                    return True
        return False

    def _make_tables(self, schema: str | None, version: int) -> None:
        has_tables = self._connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        if not has_tables and schema is None:
            raise Damaged(f"{self.path} is empty.")
        if not has_tables:
            self._connection.executescript(f"BEGIN; {schema}; COMMIT;")
        if version != _OPEN:
            self._connection.execute(f"PRAGMA user_version={_OPEN}")
        self.empty_log()

    # --- use ---

    @contextmanager
    def writing(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Executes statements. All are committed at the end of the block, or none after an error."""
        with self._lock, self._explained(), self._connection:
            yield self._connection.execute

    def read(self, statement: str, *values: Any) -> list[Any]:
        """All rows."""
        with self._lock, self._explained():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from text that has changed
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in _NOT_DAMAGE and code != sqlite3.SQLITE_IOERR_READ:
                raise StorageError.of(self.path, error) from error
            raise Damaged(f"{self.path} is damaged: {error}.") from error

    def log_bytes(self) -> int:
        """Size of the log: what was written since it was emptied last."""
        return self.log.stat().st_size if self.log.exists() else 0

    def empty_log(self) -> None:
        """Move what the log holds to the tables. Where that fails, for instance on a full disk, it stays in the log."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close it. The log is moved to the tables and removed."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA user_version=0")
            self._connection.close()
