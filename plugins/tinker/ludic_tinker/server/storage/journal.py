"""The journal of one training run: its requests and their results, in a database that survives `kill -9`.

The server writes a request before it answers the client's submit, and the result before the client can retrieve it. A snapshot
of the run's state replaces the requests that it contains.

A request is written before the submit is answered, not only before its result, because of the SDK (0.36): it sends a request
again, with the same sequence number, until it has an answer (`execute_with_retries`: connection errors, 408, 409, 429, 5xx, for
5 minutes); from then on it only asks for the result (`_APIFuture`: connection errors and 5xx without an end). A training
request whose id a restarted server does not know ends the client's program.
"""

import json
import logging
import zlib
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ludic.util.files import UNFINISHED, parse_json, replacing
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.storage.database import Damaged, Database, StorageError

logger = logging.getLogger(__name__)

STEP = "optim_step"
"""The kind of request that counts as a step."""
_TABLES = ("requests", "results", "start")
"""`start` has the number of the first request that the snapshot does not contain, if there is a snapshot."""
_SCHEMA = ";".join(
    f"CREATE TABLE {name} (seq INTEGER PRIMARY KEY, kind TEXT, payload BLOB, checksum INTEGER)" for name in _TABLES
)
_FIRST = "SELECT coalesce(max(seq), 0) FROM start"
_NUM_STEPS = "SELECT count(*) FROM requests JOIN results USING (seq) WHERE requests.kind = ?"


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
    """What a restarted server continues from."""

    next_number: int
    """The number of the first request that the state does not contain."""
    state: Mapping[str, Tensor] | None
    """None: the run has no snapshot yet and starts as it was created."""
    requests: tuple[Record, ...]
    """Requests from that number on, in order. All are carried out again, except saves and failed ones that have a result."""
    results: Mapping[int, Result]
    """By number: of those requests that were done, and of some earlier ones. A request that has one keeps it."""


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory: safetensors refuses views of one tensor, which the parts of an adapter are."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class RunJournal:
    """Requests, results and snapshots of one run, in its folder: journal.db has the requests from some number N on, and
    snapshot-N.safetensors the state before them. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        background: futures.Executor,
        is_new: bool = False,
        sync: bool = False,
        snapshot_every: int = 16,
        max_bytes: int = 64 << 20,
        num_results: int = 256,
    ) -> None:
        """`background`: carries out the writing of snapshots. A snapshot is due after `snapshot_every` steps or `max_bytes` of
        the log. `num_results`: how many results of requests before the snapshot are kept; a client has no more open requests."""
        self.folder, self._background = folder, background
        self._snapshot_every, self._max_bytes, self._num_results = snapshot_every, max_bytes, num_results
        self._pending: futures.Future[None] | None = None
        self._database = Database(folder / "journal.db", _SCHEMA if is_new else None, sync=sync)
        self._tried_steps = self._tried_bytes = 0
        """How many there were at the last attempt to write a snapshot, if it failed."""

    def recover(self) -> Recovered:
        """Contents of the files. Called once, after opening."""
        requests, results, starts = map(self._records, _TABLES)
        first = starts[0].seq if starts else 0
        self._remove_snapshots(but=self._snapshot(first))
        try:
            state = load_file(self._snapshot(first)) if first else None
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{self._snapshot(first)} cannot be read: {error}.") from error
        return Recovered(first, state, tuple(requests), {record.seq: _decoded(record) for record in results})

    def _records(self, table: str) -> list[Record]:
        found = []
        for *fields, checksum in self._database.read(f"SELECT seq, kind, payload, checksum FROM {table} ORDER BY seq"):
            if not all(map(isinstance, fields, (int, str, bytes))) or Record(*fields).checksum != checksum:
                raise Damaged(f"{self._database.path} is damaged: number {fields[0]} of {table} has a wrong checksum.")
            found.append(Record(*fields))
        return found

    # --- writing ---

    def request(self, seq: int, kind: str, payload: bytes) -> bool:
        """Write a request; False if the run has it already, which a client's retry causes."""
        return self._insert("requests", Record(seq, kind, payload), f"({_FIRST})")

    def result(self, seq: int, result: Result) -> None:
        """Write the result of a request. One that is carried out again after a restart keeps the first."""
        self._insert("results", Record(seq, *_encoded(result)), "0")

    def _insert(self, table: str, record: Record, lowest: str) -> bool:
        row = (record.seq, record.kind, record.payload, record.checksum, record.seq)
        with self._database.writing() as execute:
            return execute(f"INSERT OR IGNORE INTO {table} SELECT ?, ?, ?, ? WHERE ? >= {lowest}", row).rowcount > 0

    def kind(self, seq: int) -> str | None:
        """The kind of a request after the snapshot."""
        found = self._database.read("SELECT kind FROM requests WHERE seq = ?", seq)
        return found[0][0] if found else None

    # --- snapshots ---

    @property
    def snapshot_due(self) -> bool:
        """Whether there is enough since the last snapshot for another one."""
        if self._pending is not None and not self._pending.done():
            return False
        num_steps = self._num_steps() - self._tried_steps
        return num_steps >= self._snapshot_every or self._database.log_bytes() - self._tried_bytes > self._max_bytes

    def _num_steps(self) -> int:
        """Steps since the last snapshot that were carried out."""
        [[num_steps]] = self._database.read(_NUM_STEPS, STEP)
        assert isinstance(num_steps, int), "count(*)"
        return num_steps

    def is_last(self, seq: int) -> bool:
        """Whether no later request has come. Results do not tell: after a restart requests that have one are carried out again."""
        return not self._database.read("SELECT 1 FROM requests WHERE seq > ? LIMIT 1", seq)

    def snapshot(self, seq: int, state: Mapping[str, Tensor], *, wait: bool = False) -> None:
        """Write the state in the background, then drop the requests up to `seq`, all of which it must contain.

        `state` must not change afterwards. A failure is logged: the earlier snapshot and all requests remain. With `wait`
        the snapshot is on the disk when it returns, and a failure raises StorageError.
        """
        self.wait()
        if wait:
            self._write_snapshot(seq + 1, state)
        else:
            self._pending = self._background.submit(self._snapshot_in_background, seq + 1, state)

    def wait(self) -> None:
        """Until the snapshot in the background is written, or has failed."""
        if self._pending is not None:
            futures.wait([self._pending])

    def _snapshot_in_background(self, first: int, state: Mapping[str, Tensor]) -> None:
        try:
            self._write_snapshot(first, state)
        except StorageError as error:
            logger.warning("No snapshot of %s: %s The journal is kept.", self.folder.name, error)
            self._tried_steps, self._tried_bytes = self._num_steps(), self._database.log_bytes()

    def _write_snapshot(self, first: int, state: Mapping[str, Tensor]) -> None:
        [[known]] = self._database.read(_FIRST)
        path, start = self._snapshot(first), (first, "snapshot", b"")
        if first <= known:
            return
        try:
            with replacing(path) as unfinished:
                save_file(own_tensors(state), unfinished)
            with self._database.writing() as execute:
                execute("DELETE FROM requests WHERE seq < ?", (first,))
                execute("DELETE FROM results WHERE seq < ?", (first - self._num_results,))
                execute("DELETE FROM start")
                execute("INSERT INTO start VALUES (?, ?, ?, ?)", (*start, Record(*start).checksum))
        except (OSError, SafetensorError) as error:
            path.with_name(f"{UNFINISHED}{path.name}").unlink(missing_ok=True)
            raise error if isinstance(error, StorageError) else StorageError.of(path, error) from error
        self._database.empty_log()
        self._tried_steps, self._tried_bytes = 0, self._database.log_bytes()
        self._remove_snapshots(but=path)

    # --- files ---

    def _snapshot(self, first: int) -> Path:
        return self.folder / f"snapshot-{first}.safetensors"

    def _remove_snapshots(self, *, but: Path | None = None) -> None:
        for pattern in ("snapshot-*", f"{UNFINISHED}snapshot-*"):
            for path in self.folder.glob(pattern):
                if path != but:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """After the snapshot in the background."""
        self.wait()
        self._database.close()

    def delete(self) -> None:
        """Close and remove all files: the run will not be continued."""
        self.wait()
        self._database.delete()
        self._remove_snapshots()


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
