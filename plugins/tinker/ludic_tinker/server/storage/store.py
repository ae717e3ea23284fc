"""The data folder of a Tinker server: everything that survives a restart, also after `kill -9`.

    server.json                    format and base model; a server of another model refuses the folder
    server.db                      sessions, training runs (with the seed of their adapter) and sampling sessions
    runs/<run id>/journal.db       requests after snapshot-S.safetensors (journal.py)
    runs/<run id>/weights/<name>/  checkpoints; also sampler_weights/ and external_weights/ (checkpoints.py)

Ids follow from what the client sends (session and sequence number), so a repeated request meets the record of the first.
"""

import dataclasses
import fcntl
import functools
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Generic, TypeVar
from urllib.parse import quote

import msgspec
from torch import Tensor

from ludic.types import ConfigError
from ludic.util.files import parse_json, write_json
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.records import Refused, RequestKind, Run, Sampler, Session
from ludic_tinker.server.storage.checkpoints import Checkpoints
from ludic_tinker.server.storage.database import Damaged, Database, StorageError, log_of
from ludic_tinker.server.storage.journal import Recovered, RunJournal

logger = logging.getLogger(__name__)

_FORMAT = 2
_ABOUT = "server.json"
_SCHEMA = "CREATE TABLE records (kind TEXT, id TEXT, data BLOB, PRIMARY KEY (kind, id))"
_LOAD: RequestKind = "load_weights"
_PASS: RequestKind = "forward_backward"


Entry = TypeVar("Entry", Session, Run, Sampler)


class Table(Generic[Entry]):
    """Records of one kind by id. Thread-safe."""

    def __init__(self, kind: type[Entry], database: Database) -> None:
        self._kind: type[Entry] = kind
        self._database = database
        self._entries: dict[str, Entry] = {}
        for key, data in database.read("SELECT id, data FROM records WHERE kind = ?", kind.__name__):
            try:
                self._entries[key] = msgspec.json.decode(data, type=kind)
            except (msgspec.MsgspecError, RecursionError, TypeError) as error:
                logger.warning("%s %s in %s is left out: %s", kind.__name__, key, database.path, error)

    def put(self, entry: Entry) -> None:
        """Write an entry, over an earlier one of the same id."""
        row = (self._kind.__name__, entry.id, msgspec.json.encode(entry))
        with self._database.writing() as execute:
            execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)
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
        with self._database.writing() as execute:
            execute("DELETE FROM records WHERE kind = ? AND id = ?", (self._kind.__name__, key))
        self._entries.pop(key, None)


class DiskStore:
    """Everything that survives the process. A call returns when the data is written, and raises OSError if it cannot be.

    The event loop calls what is about records and accepted requests, the training worker the rest. One server at a time has the
    folder.
    """

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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = self._locked()
            about = self._about(base_model)
            self._database = self._opened(sync, is_new=about is None)
            self.secret = bytes.fromhex((about or self._begun(base_model))["secret"])
            """Signs the addresses of downloads."""
        except StorageError:
            raise
        except OSError as error:
            raise StorageError.of(self.folder, error) from error
        self._background = ThreadPoolExecutor(1, thread_name_prefix="ludic-tinker-snapshots")
        self._new_journal = functools.partial(
            RunJournal,
            background=self._background,
            sync=sync,
            snapshot_every=snapshot_every,
            max_bytes=max_journal_bytes,
        )
        self._journals: dict[str, RunJournal] = {}
        self.damaged: dict[str, str] = {}
        """Runs that could not be recovered, and why."""
        self.sessions, self.samplers = Table(Session, self._database), Table(Sampler, self._database)
        self.runs = Table(Run, self._database)
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

    def _about(self, base_model: str) -> dict[str, Any] | None:
        """What the folder says about itself, if it is not new; it must be of this format and base model."""
        if not (self.folder / _ABOUT).exists():
            return None
        found: dict[str, Any] = parse_json((self.folder / _ABOUT).read_text())
        if found["format"] == 1:
            raise ConfigError(
                f"{self.folder} is of a server of Ludic 0.2, whose journals are no longer read. Choose another folder with --data; "
                f"to keep the checkpoints, copy {self._runs} there."
            )
        if (found["format"], found["base_model"]) != (_FORMAT, base_model):
            raise ConfigError(
                f"{self.folder} has the runs of base model {found['base_model']!r} (format {found['format']}), but this server "
                f"serves {base_model!r} (format {_FORMAT}). Choose another folder with --data."
            )
        return found

    def _begun(self, base_model: str) -> dict[str, Any]:
        """The file that makes a folder a server's, written when its database is there."""
        about = {"format": _FORMAT, "base_model": base_model, "secret": secrets.token_hex(32)}
        write_json(self.folder / _ABOUT, about)
        (self.folder / _ABOUT).chmod(0o600)
        return about

    def _opened(self, sync: bool, *, is_new: bool) -> Database:
        """The database of records; a damaged one is set aside."""
        path = self.folder / "server.db"
        try:
            return Database(path, _SCHEMA if is_new else None, sync=sync)
        except Damaged as error:
            aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
            for file in (path, log_of(path)):
                if file.exists():
                    file.rename(file.with_name(file.name.replace(path.name, aside.name)))
            logger.error(
                "%s It is set aside as %s. Its sessions and runs have ended; their checkpoints can still be loaded.",
                error,
                aside.name,
            )
            return Database(path, _SCHEMA, sync=sync)

    def _run_folder(self, run_id: str) -> Path:
        return self._runs / quote(run_id, safe=":")

    def close(self) -> None:
        """After the snapshots in the background. Another server may then have the folder."""
        while self._journals:
            self._journals.popitem()[1].close()
        self._background.shutdown()
        self._database.close()
        self._lock_file.close()

    # --- records ---

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
        try:
            self._run_folder(run.id).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError.of(self._run_folder(run.id), error) from error
        self._open_journal(run.id, is_new=True)  # first: every run in the table has a journal
        self.runs.put(run)

    def drop_run(self, run_id: str) -> None:
        """Forget a run that no client was told of."""
        self.end_run(run_id)
        self.runs.remove(run_id)

    def _open_journal(self, run_id: str, *, is_new: bool = False) -> RunJournal:
        if run_id in self._journals:
            self._journals.pop(run_id).close()
        journal = self._journals[run_id] = self._new_journal(self._run_folder(run_id), is_new=is_new)
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
        found = [path.stat().st_mtime for path in (folder, *folder.glob("journal.db*")) if path.exists()]
        return max(found, default=self.runs.get(run_id).created)

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
            journal.result(number, result)
        except StorageError as error:
            logger.warning("The result of request %d of %s is not kept for a restart: %s", number, run_id, error)
        # The state may contain a part of a later pass if this is one, since they share batches; then a later request has come.
        if journal.snapshot_due and (kind != _PASS or journal.is_last(number)):
            journal.snapshot(number, state())

    def recover(self) -> list[tuple[Run, Recovered]]:
        """The runs that the last server had not ended, oldest first. A damaged one is logged and left out."""
        found = []
        for run in reversed(self.runs.listed()):
            if run.is_ended:
                continue
            try:
                found.append((run, self._open_journal(run.id).recover()))
            except (Damaged, ValueError, msgspec.MsgspecError) as error:
                logger.error("Run %s cannot be continued: %s Its checkpoints can still be loaded.", run.id, error)
                self.damaged[run.id] = str(error)
        return found
