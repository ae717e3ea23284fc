"""The data folder of a Tinker server: everything that survives a restart, also after `kill -9`.

    server.json                    format and base model; a server of another model refuses the folder
    sessions/<id>.json             samplers/<id>.json: sampling sessions and the weights that they sample from
    runs/<run id>/run.json         settings of a training run, with the seed of its adapter
    runs/<run id>/journal-S.log    requests after snapshot-S.safetensors (journal.py)
    runs/<run id>/weights/<name>/  checkpoints; also sampler_weights/ and external_weights/ (checkpoints.py)

Ids follow from what the client sends (session and sequence number), so a repeated request meets the record of the first.
"""

import dataclasses
import fcntl
import json
import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from torch import Tensor

from ludic.types import ConfigError
from ludic.util.files import parse_json, replacing, write_json
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.records import Checkpoint, CheckpointPath, Refused, RequestKind, Run, Sampler, Session
from ludic_tinker.server.storage.checkpoints import Checkpoints
from ludic_tinker.server.storage.journal import FAILED, Record, RunJournal, StorageError

logger = logging.getLogger(__name__)

_FORMAT = 1
_LOAD: RequestKind = "load_weights"
_PASS: RequestKind = "forward_backward"


class Kept(Protocol):
    """A record that one tenant sees."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def created(self) -> float: ...


Entry = TypeVar("Entry", bound=Kept)


class Table(Generic[Entry]):
    """Records of one kind by id, each in a file that is replaced in one step. Thread-safe."""

    def __init__(self, kind: type[Entry], path_of: Callable[[str], Path], found: Iterable[Path]) -> None:
        self._kind, self._path_of = kind, path_of
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        for path in found:
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=kind)
            except (OSError, msgspec.MsgspecError, RecursionError) as error:
                logger.warning("%s is left out: %s", path, error)
            else:
                self._entries[entry.id] = entry

    def put(self, entry: Entry) -> None:
        """Write an entry, over an earlier one of the same id."""
        path = self._path_of(entry.id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, replacing(path) as unfinished:
                unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(entry), indent=1))
        except OSError as error:
            raise StorageError.of(path, error) from error
        self._entries[entry.id] = entry

    def get(self, key: str, tenant: str | None = None) -> Entry:
        """The entry of this id. Refused(404) if there is none, or for a tenant that it does not belong to."""
        entry = self._entries.get(key)
        if entry is None or tenant not in (None, entry.tenant):
            raise Refused(404, f"There is no {self._kind.__name__.lower()} {key!r:.200}.")
        return entry

    def listed(self, tenant: str | None = None) -> list[Entry]:
        """The entries of a tenant, or all, newest first."""
        found = [entry for entry in list(self._entries.values()) if tenant in (None, entry.tenant)]
        return sorted(found, key=lambda entry: (-entry.created, entry.id))

    def remove(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            self._path_of(key).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RecoveredRun:
    """A run that the last server had not ended."""

    run: Run
    state: Mapping[str, Tensor] | None
    """None: the run starts as it was created."""
    next_number: int
    """Of the first request that the state does not contain."""
    requests: tuple[Record, ...]
    """From that number on, in their order. All are carried out again, but for saves and failed ones that have a result."""
    results: Mapping[int, Result]
    """By number: a request that has one keeps it."""


class DiskStore:
    """A `Store` in a folder. One server at a time has it."""

    def __init__(
        self,
        folder: str | Path,
        *,
        base_model: str,
        sync: bool = False,
        snapshot_every: int = 16,
        max_journal_bytes: int = 64 << 20,
    ) -> None:
        """`sync`: what was acknowledged also survives a power cut, for one disk write per request. `snapshot_every`: steps of a
        run after which its state is saved, so that a restart computes no more than these again; `max_journal_bytes`: the same for
        the data of requests, of passes without steps too."""
        if snapshot_every < 1:
            raise ConfigError(f"snapshot_every={snapshot_every}; it must be at least 1 step.")
        self.folder = Path(folder)
        self._runs = self.folder / "runs"
        self._settings: dict[str, Any] = {
            "sync": sync,
            "snapshot_every": snapshot_every,
            "max_bytes": max_journal_bytes,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = self._locked()
            self.secret = self._checked(base_model)
            """Signs the addresses of downloads."""
        except OSError as error:
            raise StorageError.of(self.folder, error) from error
        self._background = ThreadPoolExecutor(1, thread_name_prefix="ludic-tinker-snapshots")
        self._journals: dict[str, RunJournal] = {}
        self.damaged: dict[str, str] = {}
        """Runs that could not be recovered, and why."""
        self.sessions = self._table(Session, "sessions")
        self.samplers = self._table(Sampler, "samplers")
        self.runs = Table(Run, lambda key: self._run_folder(key) / "run.json", self._runs.glob("*/run.json"))
        self.checkpoints = Checkpoints(self._runs, sync=sync)

    def _locked(self) -> IO[bytes]:
        file = (self.folder / "lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"Another server uses {self.folder}. Stop it, or choose another folder with --data."
            ) from error
        return file

    def _checked(self, base_model: str) -> bytes:
        path = self.folder / "server.json"
        if not path.exists():
            write_json(path, {"format": _FORMAT, "base_model": base_model, "secret": secrets.token_hex(32)})
            path.chmod(0o600)
        found = parse_json(path.read_text())
        if (found["format"], found["base_model"]) != (_FORMAT, base_model):
            raise ConfigError(
                f"{self.folder} has the runs of base model {found['base_model']!r} (format {found['format']}), but this server "
                f"serves {base_model!r} (format {_FORMAT}). Choose another folder with --data."
            )
        return bytes.fromhex(found["secret"])

    def _table(self, kind: type[Entry], name: str) -> Table[Entry]:
        folder = self.folder / name
        return Table(kind, lambda key: folder / f"{quote(key, safe=':')}.json", folder.glob("*.json"))

    def _run_folder(self, run_id: str) -> Path:
        return self._runs / quote(run_id, safe=":")

    def close(self) -> None:
        """After the snapshots in the background. Another server may then have the folder."""
        while self._journals:
            self._journals.popitem()[1].close()
        self._background.shutdown()
        self._lock_file.close()

    # --- records ---

    def add_session(self, session: Session) -> None:
        self.sessions.put(session)

    def end_session(self, session_id: str, finished: str, detail: str | None) -> None:
        """The client said how it ended; what it said first counts."""
        session = self.sessions.get(session_id)
        if session.finished is None:
            self.sessions.put(dataclasses.replace(session, finished=finished, detail=detail))

    def forget_session(self, session_id: str) -> None:
        """Forget a session that has ended, and its runs that left no checkpoint."""
        tenant = self.sessions.get(session_id).tenant
        self.sessions.remove(session_id)
        for run in self.runs.listed(tenant):
            if run.session == session_id and not self.checkpoints.listed(tenant, run.id):
                self._forget_run(run.id)

    def forget_ended_runs(self, tenant: str, *, keep: int) -> None:
        """Forget the tenant's runs that ended without a checkpoint, except for the newest `keep`."""
        saved = {checkpoint.path.run for checkpoint in self.checkpoints.listed(tenant)}
        for run in [run for run in self.runs.listed(tenant) if run.is_ended and run.id not in saved][keep:]:
            self._forget_run(run.id)

    def _forget_run(self, run_id: str) -> None:
        self.runs.remove(run_id)
        shutil.rmtree(self._run_folder(run_id), ignore_errors=True)

    def add_run(self, run: Run) -> None:
        assert run.spec.seed is not None, "after a restart the adapter is made again from its seed"
        self.runs.put(run)
        self._open_journal(run.id)

    def drop_run(self, run_id: str) -> None:
        """Forget a run that no client was told of."""
        self.end_run(run_id)
        self.runs.remove(run_id)

    def _open_journal(self, run_id: str) -> RunJournal:
        if run_id in self._journals:
            self._journals.pop(run_id).close()
        journal = RunJournal(self._run_folder(run_id), background=self._background, **self._settings)
        self._journals[run_id] = journal
        return journal

    def end_run(self, run_id: str) -> None:
        """The run takes no more requests: its journal is removed, its checkpoints stay."""
        self.runs.put(dataclasses.replace(self.runs.get(run_id), is_ended=True))
        journal = self._journals.pop(run_id, None)
        if journal is not None:
            journal.delete()

    def last_request(self, run_id: str) -> float:
        """When a run was last written to."""
        folder = self._run_folder(run_id)
        return max(path.stat().st_mtime for path in [folder / "run.json", *folder.glob("journal-*.log")])

    def add_sampler(self, sampler: Sampler) -> None:
        self.samplers.put(sampler)

    def remove_sampler(self, sampler_id: str) -> None:
        """The sampling session has ended."""
        self.samplers.remove(sampler_id)

    # --- training requests ---

    def accept(self, run_id: str, number: int, kind: RequestKind, payload: bytes) -> None:
        """A training request, before the client is told that it was accepted."""
        self._journals[run_id].request(number, kind, payload)

    def executed(self, run_id: str, number: int, result: Result, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """A training request is carried out. Its result is visible when this returns.

        A full disk raises nothing here: the request itself is in the journal, so a restart carries it out again.
        """
        journal = self._journals[run_id]
        kind = journal.kind(number)
        try:
            if kind == _LOAD and not isinstance(result, Failure):
                # The loaded checkpoint may be overwritten later, so a restart must not have to load it again.
                journal.snapshot(number, state(), wait=True)
            journal.result(number, *_encoded(result))
        except StorageError as error:
            logger.warning("The result of request %d of %s is not kept for a restart: %s", number, run_id, error)
        # The state may contain a part of a later pass if this is one, since they share batches; then a later request has come.
        if journal.snapshot_due and (kind != _PASS or journal.is_last(number)):
            journal.snapshot(number, state())

    def recover(self) -> list[RecoveredRun]:
        """The runs that the last server had not ended, oldest first. One whose files are damaged is logged and left out."""
        found = []
        for run in reversed(self.runs.listed()):
            if run.is_ended:
                continue
            try:
                saved = self._open_journal(run.id).recover()
                results = {number: _decoded(record) for number, record in saved.results.items()}
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                logger.error("Run %s cannot be continued: %s Its checkpoints can still be loaded.", run.id, error)
                self.damaged[run.id] = str(error)
                continue
            found.append(RecoveredRun(run, saved.state, saved.first_seq, saved.requests, results))
        return found

    # --- checkpoints ---

    def save_checkpoint(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, overwrite: bool) -> None:
        self.checkpoints.save(checkpoint, tensors, overwrite=overwrite)

    def load_checkpoint(self, path: CheckpointPath) -> tuple[Checkpoint, dict[str, Tensor]]:
        return self.checkpoints.load(path)

    def checkpoint(self, path: CheckpointPath) -> Checkpoint:
        return self.checkpoints.get(path)

    def delete_checkpoint(self, path: CheckpointPath) -> None:
        self.checkpoints.delete(path)


def _encoded(result: Result) -> tuple[str, bytes]:
    """The kind and payload of a result's record."""
    if isinstance(result, Failure):
        return FAILED, msgspec.json.encode(result)
    return ("proto", result) if isinstance(result, bytes) else ("json", json.dumps(result).encode())


def _decoded(record: Record) -> Result:
    if record.kind == FAILED:
        return msgspec.json.decode(record.payload, type=Failure)
    decoded: Result = record.payload if record.kind == "proto" else parse_json(record.payload)
    return decoded
