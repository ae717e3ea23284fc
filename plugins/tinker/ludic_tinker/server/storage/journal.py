"""The journal of one training run: its requests and their results, in a file that survives `kill -9`.

The server appends a request before it answers the client's submit, and the result before the client can retrieve it. The
kernel keeps what was written when the process is killed; `sync` also waits for the disk, so that a power cut loses nothing.
A snapshot of the run's state replaces the requests that it contains. `RunJournal` recovers snapshot and requests after a
restart.

A request is written before the submit is answered, not only before its result, because of the SDK (0.36): it sends a request
again, with the same sequence number, until it has an answer (`execute_with_retries`: connection errors, 408, 409, 429, 5xx, for
5 minutes); from then on it only asks for the result (`_APIFuture`: connection errors and 5xx without an end). A training
request whose id a restarted server does not know ends the client's program.
"""

import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ludic.util.files import UNFINISHED, NotWritten, replacing

logger = logging.getLogger(__name__)

STEP = "optim_step"
"""The kind of request that counts as a step."""
FAILED = "failed"
"""The kind of result of a request that was refused or failed: it is not carried out again after a restart."""
_FIELDS = struct.Struct("<HQ?II")
"""Length of the kind's name, sequence number, is a result, length and checksum of the body; then the checksum of these."""
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class StorageError(NotWritten):
    """The data folder cannot be written or read; the message says why and what to do."""

    advice = "free some, for example by deleting checkpoints"


class JournalDamaged(StorageError):
    """A record in the middle of a journal is not what was written."""


@dataclass(frozen=True, slots=True)
class Record:
    """A request of a run, or the result of one."""

    seq: int
    """The client's sequence number; requests of a run are carried out in this order."""
    kind: str
    """Of a request its name, of a result its encoding or FAILED."""
    payload: bytes
    is_result: bool = False

    def encoded(self) -> bytes:
        name = self.kind.encode()
        body = name + self.payload
        fields = _FIELDS.pack(len(name), self.seq, self.is_result, len(body), zlib.crc32(body))
        return fields + _CHECKSUM.pack(zlib.crc32(fields)) + body


def decode(data: bytes, name: str = "journal") -> Iterator[tuple[Record, int]]:
    """Each whole record and the offset behind it. Ends at a record that a killed process did not finish.

    Every prefix of a record has a right header or is shorter than one. So a wrong checksum with more data behind it is no
    interrupted write, and raises JournalDamaged: requests behind it were acknowledged, and leaving them out would be silent loss.
    After a power cut the end may also be zeros.
    """
    place = 0
    while len(data) - place >= _HEADER_BYTES:
        length, seq, is_result, size, checksum = _FIELDS.unpack_from(data, place)
        start = place + _HEADER_BYTES
        if _CHECKSUM.pack(zlib.crc32(data[place : place + _FIELDS.size])) != data[start - _CHECKSUM.size : start]:
            if any(data[place:]):
                raise JournalDamaged(f"{name} is damaged at byte {place}: a header has a wrong checksum.")
            return
        if start + size > len(data):
            return
        body = data[start : start + size]
        if zlib.crc32(body) != checksum:
            if start + size < len(data) and any(data[start + size :]):
                raise JournalDamaged(f"{name} is damaged at byte {start}: request {seq} has a wrong checksum.")
            return
        place = start + size
        yield Record(seq, body[:length].decode(), body[length:], is_result), place


class JournalFile:
    """A file of records that is appended to. Opening it cuts off a record that was not finished."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path, self._sync = path, sync
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            data = self.read()
            whole = list(decode(data, str(path)))
        except BaseException:
            os.close(self._file)
            raise
        self.records = [record for record, _ in whole]
        """What the file held when it was opened; the caller may empty it."""
        self.size = whole[-1][1] if whole else 0
        if self.size < len(data):
            logger.warning(
                "%s ends in the middle of a write; the last %d bytes, a request that was not acknowledged, are cut off.",
                path,
                len(data) - self.size,
            )
            os.ftruncate(self._file, self.size)

    def append(self, record: Record) -> None:
        """The record is in the file when it returns; after a StorageError the file is as before."""
        data = memoryview(record.encoded())
        place = self.size
        try:
            while data:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written
            if self._sync:
                os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self.size)
            raise StorageError.of(self.path, error) from error
        self.size = place

    def read(self) -> bytes:
        """The whole file."""
        return os.pread(self._file, os.fstat(self._file).st_size, 0)

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a restarted server continues from."""

    first_seq: int
    """The state contains every request before this number."""
    state: Mapping[str, Tensor] | None
    """None: the run has no snapshot yet and starts as it was created."""
    requests: tuple[Record, ...]
    """The requests from that number on, in their order, carried out or not."""
    results: Mapping[int, Record] = field(default_factory=dict)
    """Results by sequence number: of those requests that were done, and of some earlier ones."""


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory: safetensors refuses views of one tensor, which the parts of an adapter are."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class RunJournal:
    """Requests, results and snapshots of one run, in its folder: journal-N.log has the requests from number N on, and
    snapshot-N.safetensors the state before them. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        background: Executor,
        sync: bool = False,
        snapshot_every: int = 16,
        max_bytes: int = 64 << 20,
        num_results: int = 256,
    ) -> None:
        """`background`: carries out the writing of snapshots. A snapshot is due after `snapshot_every` steps or `max_bytes` of
        requests. `num_results`: how many results of requests before the snapshot are kept; a client has no more open requests."""
        self.folder, self._background, self._sync = folder, background, sync
        self._snapshot_every, self._max_bytes, self._num_results = snapshot_every, max_bytes, num_results
        self._lock = threading.RLock()
        self._pending: Future[None] | None = None
        self._first_seq = self._newest_pair()
        self._file = JournalFile(self._journal(self._first_seq), sync=sync)
        self._kinds: dict[int, str] = {}
        """Of the requests in the file."""
        self._done: set[int] = set()
        """Numbers of the results in the file."""
        self._num_steps = 0
        for record in self._file.records:
            self._count(record)
        self._kept_bytes = 0
        """Size of the file when it was begun."""

    def recover(self) -> Recovered:
        """What the files hold. Called once, after opening."""
        records, self._file.records = self._file.records, []
        state = None
        if self._first_seq:
            try:
                state = load_file(self._snapshot(self._first_seq))
            except (OSError, SafetensorError) as error:
                raise JournalDamaged(f"{self._snapshot(self._first_seq)} cannot be read: {error}.") from error
        requests = {r.seq: r for r in records if not r.is_result}
        results = {r.seq: r for r in records if r.is_result}
        return Recovered(self._first_seq, state, tuple(requests[seq] for seq in sorted(requests)), results)

    # --- appending ---

    def request(self, seq: int, kind: str, payload: bytes) -> bool:
        """Append a request; False if the run has it already, which a client's retry causes."""
        with self._lock:
            if seq < self._first_seq or seq in self._kinds:
                return False
            self._append(Record(seq, kind, payload))
            return True

    def kind(self, seq: int) -> str | None:
        """Of a request after the snapshot."""
        return self._kinds.get(seq)

    def result(self, seq: int, kind: str, payload: bytes) -> None:
        """Append the result of a request. One that is carried out again after a restart keeps the first."""
        with self._lock:
            if seq not in self._done:
                self._append(Record(seq, kind, payload, is_result=True))

    def _append(self, record: Record) -> None:
        self._file.append(record)
        self._count(record)

    def _count(self, record: Record) -> None:
        if not record.is_result:
            self._kinds[record.seq] = record.kind
            return
        self._done.add(record.seq)
        self._num_steps += self._kinds.get(record.seq) == STEP

    # --- snapshots ---

    @property
    def snapshot_due(self) -> bool:
        """Whether the requests since the last snapshot are many enough for another one."""
        with self._lock:
            is_long = self._file.size - self._kept_bytes > self._max_bytes
            is_writing = self._pending is not None and not self._pending.done()
            return not is_writing and (is_long or self._num_steps >= self._snapshot_every)

    def is_last(self, seq: int) -> bool:
        """Whether no later request has come. Results do not tell: after a restart requests that have one are carried out again."""
        with self._lock:
            return seq == max(self._kinds, default=seq)

    def snapshot(self, seq: int, state: Mapping[str, Tensor], *, wait: bool = False) -> None:
        """Write the state in the background, then drop the requests up to `seq`, all of which it must contain.

        `state` must not change afterwards. A failure is logged: the earlier snapshot and the whole journal remain. With `wait`
        the snapshot is on the disk when it returns, and a failure raises StorageError.
        """
        self.wait()
        if wait:
            self._write_snapshot(seq, state)
        else:
            self._pending = self._background.submit(self._snapshot_in_background, seq, state)

    def wait(self) -> None:
        """Until the snapshot in the background is written."""
        pending = self._pending
        if pending is not None:
            pending.result()

    def _snapshot_in_background(self, seq: int, state: Mapping[str, Tensor]) -> None:
        try:
            self._write_snapshot(seq, state)
        except StorageError as error:
            logger.warning("No snapshot of %s: %s The journal is kept.", self.folder.name, error)
            with self._lock:
                self._num_steps = 0  # the next attempt comes after as many steps again
                self._kept_bytes = self._file.size

    def _write_snapshot(self, seq: int, state: Mapping[str, Tensor]) -> None:
        first = seq + 1
        path = self._snapshot(first)
        if first <= self._first_seq:
            return
        try:
            with replacing(path) as unfinished:
                save_file(own_tensors(state), unfinished)
            self._begin_file(first)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            self._remove(lambda name: name.startswith(UNFINISHED))
            raise StorageError.of(path, error) from error
        self._remove_others(first)

    def _begin_file(self, first: int) -> None:
        """Continue in a file without the requests that the snapshot contains. Its name appears when it is complete."""
        with self._lock:
            records = [record for record, _ in decode(self._file.read(), str(self._file.path))]
            kept = [r for r in records if r.seq >= first or (r.is_result and r.seq >= first - self._num_results)]
            path = self._journal(first)
            with replacing(path) as unfinished:
                unfinished.write_bytes(b"".join(record.encoded() for record in kept))
            begun = JournalFile(path, sync=self._sync)
            begun.records = []
            self._file.close()
            self._file, self._first_seq, self._kept_bytes = begun, first, begun.size
            self._kinds, self._done, self._num_steps = {}, set(), 0
            for record in kept:
                self._count(record)

    # --- files ---

    def _snapshot(self, first: int) -> Path:
        return self.folder / f"snapshot-{first}.safetensors"

    def _journal(self, first: int) -> Path:
        return self.folder / f"journal-{first}.log"

    def _newest_pair(self) -> int:
        """The number of the newest journal whose snapshot is there. A snapshot alone is from a process that was killed before it
        continued in a new journal."""
        found = [int(path.stem.removeprefix("journal-")) for path in self.folder.glob("journal-*.log")]
        newest = max((first for first in found if first == 0 or self._snapshot(first).exists()), default=0)
        if found and newest not in found:
            raise JournalDamaged(f"{self.folder} has a journal but not the snapshot that it continues.")
        self._remove_others(newest)
        return newest

    def _remove_others(self, first: int) -> None:
        own = {self._snapshot(first).name, self._journal(first).name}
        self._remove(lambda name: name not in own)

    def _remove(self, is_old: Callable[[str], bool]) -> None:
        for pattern in ("snapshot-*", "journal-*", f"{UNFINISHED}snapshot-*", f"{UNFINISHED}journal-*"):
            for path in self.folder.glob(pattern):
                if is_old(path.name):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """After the snapshot in the background."""
        self.wait()
        with self._lock:
            self._file.close()

    def delete(self) -> None:
        """Close and remove all files: the run will not be continued."""
        self.close()
        self._remove(lambda name: True)
