"""The journals of training runs: requests and results in a database in the folder of each run, and snapshots of its state.

A damaged journal ends its run alone, one that is emptied holds up no other run, and an ended run leaves its room on the disk.

The server writes a request before it answers the client's submit, and the result before the client can retrieve it. A snapshot
of the run's state replaces the requests that it contains.

A request is written before the submit is answered, not only before its result, because of the SDK (0.36): it sends a request
again, with the same sequence number, until it has an answer (`execute_with_retries`: connection errors, 408, 409, 429, 5xx, for
5 minutes); from then on it only asks for the result (`_APIFuture`: connection errors and 5xx without an end). A training
request whose id a restarted server does not know ends the client's program.
"""

import contextlib
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ludic.util.files import UNFINISHED, parse_json, replacing
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.records import RequestKind
from ludic_tinker.server.storage.database import Damaged, Database, StorageError

logger = logging.getLogger(__name__)

_FILE = "journal.db"
_SCHEMA = (
    "CREATE TABLE journal (role TEXT, seq INTEGER, kind TEXT, checksum INTEGER, payload BLOB, PRIMARY KEY (role, seq))"
)
_REQUEST, _RESULT = "request", "result"
"""Roles of a record."""
_STEP: RequestKind = "optim_step"
_LOAD: RequestKind = "load_weights"
_PASS: RequestKind = "forward_backward"


@dataclass(frozen=True, slots=True)
class Record:
    """A request of a run, or the result of one."""

    seq: int
    """The client's sequence number; requests of a run are carried out in this order."""
    kind: str
    """The name of a request, or the encoding of a result: json, proto or failed."""
    payload: bytes

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.payload, zlib.crc32(f"{self.seq} {self.kind}".encode()))


@dataclass(frozen=True, slots=True)
class Recovered:
    """The point from which a restarted server continues a run."""

    next_number: int
    """The number of the first request that the state does not contain."""
    state: Mapping[str, Tensor] | None
    """None: the run has no snapshot yet and starts as it was created."""
    requests: tuple[Record, ...]
    """Requests from that number on, in order. All are carried out again, except saves and failed ones that have a result."""
    results: Mapping[int, Result]
    """Results by number of the requests that were done, and of some earlier ones. A request that has one keeps it."""


@dataclass(slots=True)
class _Progress:
    """Work of a run since the last attempt to write a snapshot of it."""

    num_steps: int = 0
    num_bytes: int = 0
    writing: "futures.Future[None] | None" = None
    """The snapshot that is written in the background."""


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory: safetensors refuses views of one tensor, which the parts of an adapter are."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class Journal:
    """Requests, results and snapshots of all runs: journal.db in the folder of a run has its requests from some number N on,
    and snapshot-N.safetensors the state before them. Thread-safe."""

    def __init__(
        self,
        folder_of: Callable[[str], Path],
        *,
        sync: bool = False,
        snapshot_every: int = 16,
        max_bytes: int = 64 << 20,
        num_results: int = 256,
    ) -> None:
        """`folder_of`: the folder of a run. A snapshot is due after `snapshot_every` steps or `max_bytes` of requests.
        `num_results`: how many results of requests before the snapshot are kept; a client has no more open requests."""
        self._folder_of, self._sync = folder_of, sync
        self._snapshot_every, self._max_bytes, self._num_results = snapshot_every, max_bytes, num_results
        self._background = futures.ThreadPoolExecutor(1, thread_name_prefix="ludic-tinker-snapshots")
        self._databases: dict[str, Database] = {}
        self._progress: dict[str, _Progress] = {}

    def begin(self, run: str) -> None:
        """The journal of a new run; one that a killed server has begun is taken over."""
        folder = self._folder_of(run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError.of(folder, error) from error
        if run not in self._databases:
            self._databases[run] = Database(folder / _FILE, _SCHEMA, sync=self._sync)

    # --- requests and results ---

    def accept(self, run: str, number: int, kind: str, payload: bytes) -> None:
        """Write a request; one that the run has already stays as it is."""
        _insert(self._databases[run], _REQUEST, Record(number, kind, payload))

    def executed(self, run: str, number: int, result: Result, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Write the result of a request, which is visible when this returns, and a snapshot if one is due.

        A request that is carried out again after a restart keeps its first result. A full disk raises nothing here: the
        request itself is in the journal, so a restart carries it out again.
        """
        database = self._databases.get(run)
        if database is None:  # the run has ended meanwhile
            return
        rows = "SELECT kind, length(payload) FROM journal WHERE role = ? AND seq = ?"
        found = database.read(rows, _REQUEST, number)
        if not found:  # a snapshot contains it
            return
        [(kind, num_bytes)] = found
        try:
            _insert(database, _RESULT, Record(number, *_encoded(result)))
            if kind == _LOAD and not isinstance(result, Failure):
                # The loaded checkpoint may be overwritten later, so a restart must not have to load it again.
                self.snapshot(run, number, state(), wait=True)
        except StorageError as error:
            logger.warning("The result of request %d of %s is not kept for a restart: %s", number, run, error)
        own = self._progress_of(run)
        own.num_steps += kind == _STEP
        own.num_bytes += num_bytes
        is_due = own.num_steps >= self._snapshot_every or own.num_bytes > self._max_bytes
        if not is_due or (own.writing is not None and not own.writing.done()):
            return
        # The state may contain a part of a later pass if this is one, since they share batches; then a later request has come.
        if kind != _PASS or _is_last(database, number):
            self.snapshot(run, number, state())

    def _progress_of(self, run: str) -> _Progress:
        return self._progress.setdefault(run, _Progress())

    def last_time(self, run: str) -> float | None:
        """When a run was last written to; None if nothing is kept of it."""
        return max((path.stat().st_mtime for path in self._folder_of(run).glob(f"{_FILE}*")), default=None)

    # --- snapshots ---

    def snapshot(self, run: str, number: int, state: Mapping[str, Tensor], *, wait: bool = False) -> None:
        """Write the state in the background, then drop the requests up to `number`, all of which it must contain.

        `state` must not change afterwards. A failure is logged: the earlier snapshot and all requests remain. With `wait`
        the snapshot is on the disk when it returns, and a failure raises StorageError.
        """
        self.wait(run)
        own, database = self._progress_of(run), self._databases.get(run)
        own.num_steps = own.num_bytes = 0
        if database is None:  # the run has ended meanwhile
            return
        if wait:
            self._write_snapshot(database, run, number + 1, state)
        else:
            own.writing = self._background.submit(self._snapshot_in_background, database, run, number + 1, state)

    def wait(self, run: str) -> None:
        """Wait until the snapshot in the background is written, or has failed."""
        if (writing := self._progress_of(run).writing) is not None:
            futures.wait([writing])

    def _snapshot_in_background(self, database: Database, run: str, first: int, state: Mapping[str, Tensor]) -> None:
        try:
            self._write_snapshot(database, run, first, state)
        except StorageError as error:
            logger.warning("No snapshot of %s: %s The journal is kept.", run, error)

    def _write_snapshot(self, database: Database, run: str, first: int, state: Mapping[str, Tensor]) -> None:
        path = self._snapshot(run, first)
        try:
            with replacing(path) as unfinished:
                save_file(own_tensors(state), unfinished)
            with database.writing() as execute:
                for role, kept_from in ((_REQUEST, first), (_RESULT, first - self._num_results)):
                    execute("DELETE FROM journal WHERE role = ? AND seq < ?", (role, kept_from))
        except (OSError, SafetensorError) as error:
            for left in (path, path.with_name(f"{UNFINISHED}{path.name}")):
                left.unlink(missing_ok=True)
            raise error if isinstance(error, StorageError) else StorageError.of(path, error) from error
        database.empty_log()
        self._remove_snapshots(run, but=path)

    def _snapshot(self, run: str, first: int) -> Path:
        return self._folder_of(run) / f"snapshot-{first}.safetensors"

    def _remove_snapshots(self, run: str, *, but: Path | None = None) -> None:
        for pattern in ("snapshot-*", f"{UNFINISHED}snapshot-*"):
            for path in self._folder_of(run).glob(pattern):
                if path != but:
                    path.unlink(missing_ok=True)

    # --- restart and end ---

    def recover(self, run: str) -> Recovered:
        """Contents of the journal of one run. Called once, before its first request."""
        if run not in self._databases:
            self._databases[run] = Database(self._folder_of(run) / _FILE, sync=self._sync)
        requests, results = (_records(self._databases[run], role) for role in (_REQUEST, _RESULT))
        # A server that was killed before it dropped the requests that a snapshot contains has left them; they do not count.
        snapshots = self._folder_of(run).glob("snapshot-*.safetensors")
        first = max((int(path.stem.removeprefix("snapshot-")) for path in snapshots), default=0)
        path = self._snapshot(run, first)
        # A request is dropped with a snapshot only, so one that was done is in the journal or in the snapshot.
        is_done_and_dropped = {record.seq for record in results if record.seq >= first} - {r.seq for r in requests}
        if is_done_and_dropped or (not first and (not requests or requests[0].seq > 0)):
            raise Damaged(f"{path.parent} has lost its snapshot, or requests that were done.")
        self._remove_snapshots(run, but=path)
        try:
            state = load_file(path) if first else None
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{path} cannot be read: {error}.") from error
        left = tuple(request for request in requests if request.seq >= first)
        return Recovered(first, state, left, {record.seq: _decoded(record) for record in results})

    def end(self, run: str) -> None:
        """Remove records and snapshots: the run will not be continued."""
        self.wait(run)
        if (database := self._databases.pop(run, None)) is not None:
            database.close()
        folder = self._folder_of(run)
        for name in (f"{_FILE}-wal", _FILE):
            (folder / name).unlink(missing_ok=True)
        self._remove_snapshots(run)
        self._progress.pop(run, None)
        with contextlib.suppress(OSError):  # it has checkpoints
            folder.rmdir()

    def close(self) -> None:
        """End after the snapshots in the background."""
        self._background.shutdown()
        while self._databases:
            self._databases.popitem()[1].close()


def _insert(database: Database, role: str, record: Record) -> None:
    row = (role, record.seq, record.kind, record.checksum, record.payload)
    with database.writing() as execute:
        execute("INSERT OR IGNORE INTO journal VALUES (?, ?, ?, ?, ?)", row)


def _is_last(database: Database, number: int) -> bool:
    """True if no later request has come. Results do not tell: after a restart requests that have one are carried out again."""
    return not database.read("SELECT 1 FROM journal WHERE role = ? AND seq > ? LIMIT 1", _REQUEST, number)


def _records(database: Database, role: str) -> list[Record]:
    found = []
    rows = "SELECT seq, kind, payload, checksum FROM journal WHERE role = ? ORDER BY seq"
    for *fields, checksum in database.read(rows, role):
        if not all(map(isinstance, fields, (int, str, bytes))) or Record(*fields).checksum != checksum:
            raise Damaged(f"{database.path} is damaged: {role} {fields[0]} has a wrong checksum.")
        found.append(Record(*fields))
    return found


def _encoded(result: Result) -> tuple[str, bytes]:
    """The kind and payload of a result's record."""
    if isinstance(result, Failure):
        return "failed", msgspec.json.encode(result)
    return ("proto", result) if isinstance(result, bytes) else ("json", json.dumps(result).encode())


def _decoded(record: Record) -> Result:
    """The result of a record; ValueError or MsgspecError if it cannot be read."""
    if record.kind == "failed":
        return msgspec.json.decode(record.payload, type=Failure)
    decoded: Result = record.payload if record.kind == "proto" else parse_json(record.payload)
    return decoded
