"""The data folder of a Tinker server: everything that survives a restart, also after `kill -9`.

    server.json                    format and base model; a server of another model refuses the folder
    server.db                      sessions, training runs (with the seed of their adapter), sampling sessions
    runs/<run id>/journal.db       the requests of a run after its snapshot-N.safetensors (journal.py)
    runs/<run id>/weights/<name>/  checkpoints; also sampler_weights/ and external_weights/ (checkpoints.py)

Ids follow from what the client sends (session and sequence number), so a repeated request meets the record of the first.
"""

import dataclasses
import fcntl
import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Generic, TypeVar
from urllib.parse import quote, unquote

import msgspec

from ludic.types import ConfigError
from ludic.util.files import parse_json, write_json
from ludic_tinker.server.records import Refused, RequestKind, Run, Sampler, Session
from ludic_tinker.server.storage.checkpoints import Checkpoints
from ludic_tinker.server.storage.database import Damaged, Database, StorageError
from ludic_tinker.server.storage.journal import Journal, Recovered

logger = logging.getLogger(__name__)

_FORMAT = 3
_ABOUT = "server.json"
_SCHEMA = "CREATE TABLE records (kind TEXT, id TEXT, data BLOB, PRIMARY KEY (kind, id))"

Entry = TypeVar("Entry", Session, Run, Sampler)


class Table(Generic[Entry]):
    """Records of one kind by id. Thread-safe."""

    def __init__(self, kind: type[Entry], name: str, database: Database) -> None:
        self._name, self._database = name, database
        self._entries: dict[str, Entry] = {}
        for key, data in database.read("SELECT id, data FROM records WHERE kind = ?", name):
            try:
                self._entries[key] = msgspec.json.decode(data, type=kind)
            except (msgspec.MsgspecError, RecursionError, TypeError) as error:
                logger.warning("The %s %s in %s is left out: %s", name, key, database.path, error)

    def put(self, entry: Entry) -> None:
        """Write an entry, over an earlier one of the same id."""
        row = (self._name, entry.id, msgspec.json.encode(entry))
        with self._database.writing() as execute:
            execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)
        self._entries[entry.id] = entry

    def get(self, key: str, tenant: str | None = None) -> Entry:
        """The entry of this id. Refused(404) if there is none, or for a tenant that it does not belong to."""
        entry = self._entries.get(key)
        if entry is None or tenant not in (None, entry.tenant):
            raise Refused(404, f"There is no {self._name} {key!r:.200}.")
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def listed(self, tenant: str | None = None) -> list[Entry]:
        """The entries of a tenant, or all, newest first."""
        found = [entry for entry in self if tenant in (None, entry.tenant)]
        return sorted(found, key=lambda entry: (-entry.created, entry.id))

    def remove(self, key: str) -> None:
        with self._database.writing() as execute:
            execute("DELETE FROM records WHERE kind = ? AND id = ?", (self._name, key))
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
        self.journal = Journal(self._run_folder, sync=sync, snapshot_every=snapshot_every, max_bytes=max_journal_bytes)
        self._max_log_bytes = max_journal_bytes
        self.damaged: dict[str, str] = {}
        """Runs that could not be recovered, and why."""
        self.sessions = Table(Session, "session", self._database)
        self.runs = Table(Run, "training run", self._database)
        self.samplers = Table(Sampler, "sampling session", self._database)
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
        """The contents of server.json, if the folder is not new; it must be of this format and base model."""
        if not (self.folder / _ABOUT).exists():
            return None
        found: dict[str, Any] = parse_json((self.folder / _ABOUT).read_text())
        if found["format"] != _FORMAT:
            raise ConfigError(
                f"{self.folder} is of another version of Ludic, whose journals are no longer read. Choose another folder with "
                f"--data; to keep the checkpoints, copy {self._runs} there."
            )
        if found["base_model"] != base_model:
            raise ConfigError(
                f"{self.folder} has the runs of base model {found['base_model']!r}, but this server serves {base_model!r}. Choose "
                "another folder with --data."
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
            aside = f"{path.name}.damaged-{time.time_ns()}"
            for file in self.folder.glob(f"{path.name}*"):
                if ".damaged-" not in file.name:
                    file.rename(file.with_name(file.name.replace(path.name, aside)))
            logger.error(
                "%s It is set aside as %s. Its sessions and runs have ended; their checkpoints can still be loaded.",
                error,
                aside,
            )
            return Database(path, _SCHEMA, sync=sync)

    def _run_folder(self, run_id: str) -> Path:
        return self._runs / quote(run_id, safe=":")

    def close(self) -> None:
        """End after the snapshots in the background. Another server may then have the folder."""
        self.journal.close()
        self._database.close()
        self._lock_file.close()

    # --- records ---

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
        for run in [run for run in self.runs.listed(tenant) if run.ended is not None and run.id not in saved][keep:]:
            self._forget_run(run.id)

    def _forget_run(self, run_id: str) -> None:
        self.runs.remove(run_id)
        shutil.rmtree(self._run_folder(run_id), ignore_errors=True)

    def add_run(self, run: Run, kind: RequestKind, payload: bytes = b"") -> None:
        """A new run with the request 0 that makes it."""
        self.journal.begin(run.id)
        self.journal.accept(run.id, 0, kind, payload)  # first: every run in the table has its request 0
        self.runs.put(run)

    def end_run(self, run_id: str) -> None:
        """The run takes no more requests: its journal is removed, its checkpoints stay."""
        self.runs.put(dataclasses.replace(self.runs.get(run_id), ended=time.time()))
        self.journal.end(run_id)
        if self._database.log_bytes() > self._max_log_bytes:
            self._database.empty_log()

    def last_request(self, run_id: str) -> float:
        """When a run was last written to."""
        run = self.runs.get(run_id)
        return run.ended or self.journal.last_time(run_id) or run.created

    def recover(self) -> list[tuple[Run, Recovered]]:
        """The runs that the last server had not ended, oldest first. A damaged one is logged and left out."""
        open_runs = [run for run in reversed(self.runs.listed()) if run.ended is None]
        if not any(self.folder.glob("server.db.damaged-*")):  # whose runs are not known any more
            journals = {unquote(path.parent.name) for path in self._runs.glob("*/journal.db")}
            for run_id in journals - {run.id for run in open_runs}:  # the server was killed as it began or ended them
                self.journal.end(run_id)
        found = []
        for run in open_runs:
            try:
                found.append((run, self.journal.recover(run.id)))
            except (Damaged, ValueError, msgspec.MsgspecError) as error:
                logger.error("Run %s cannot be continued: %s Its checkpoints can still be loaded.", run.id, error)
                self.damaged[run.id] = str(error)
        return found
