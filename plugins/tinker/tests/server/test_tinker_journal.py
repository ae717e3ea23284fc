"""The journal of a training run: no acknowledged record is lost, none is invented, whatever moment the process dies at."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ludic.types  # noqa: F401 - first, since ludic.util.files imports it in a circle (mended on branch view)
from ludic_tinker.server.storage.database import Damaged, StorageError
from ludic_tinker.server.storage.journal import STEP, Record, RunJournal

pytestmark = pytest.mark.slow

REQUESTS = [Record(seq, STEP, bytes([seq]) * (20 if seq % 2 else 9000)) for seq in range(6)]
DISTURBED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_run(folder: Path, **settings: Any) -> RunJournal:
    folder.mkdir(parents=True, exist_ok=True)
    return RunJournal(folder, background=ThreadPoolExecutor(1), **{"is_new": True, **settings})


def reopened(folder: Path) -> list[Record]:
    """The requests that a restarted server finds."""
    journal = open_run(folder, is_new=False)
    try:
        return list(journal.recover().requests)
    finally:
        journal.close()


class Left:
    """The files that a killed server leaves after six requests, and those of one that was closed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder / "copy"
        journal = open_run(folder / "live")
        log = folder / "live/journal.db-wal"
        self.ends = []
        """The size of the log after each request."""
        for record in REQUESTS:
            journal.request(record.seq, record.kind, record.payload)
            self.ends.append(log.stat().st_size)
        shutil.copytree(folder / "live", folder / "killed")
        journal.close()

    def again(self, name: str) -> tuple[Path, Path]:
        """Database and log of a fresh copy."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.folder / name, self.copy)
        return self.copy / "journal.db", self.copy / "journal.db-wal"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return Left(tmp_path_factory.mktemp("journal"))


def test_all_is_there_after_a_kill_and_after_a_close(left: Left):
    left.again("killed")
    assert reopened(left.copy) == REQUESTS
    _, log = left.again("live")
    assert reopened(left.copy) == REQUESTS and not log.exists()


@given(data=st.data())
@DISTURBED
def test_a_log_cut_at_any_byte_has_exactly_the_records_before_the_cut(left: Left, data: Any):
    _, log = left.again("killed")
    whole = log.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    log.write_bytes(whole[:cut])
    kept = [record for record, end in zip(REQUESTS, left.ends, strict=True) if end <= cut]
    assert reopened(left.copy) == kept

    journal, added = open_run(left.copy, is_new=False), Record(7, STEP, b"after the restart")
    journal.request(added.seq, added.kind, added.payload)
    journal.close()
    assert reopened(left.copy) == [*kept, added]


@given(zeros=st.integers(0, 9000), data=st.data())
@DISTURBED
def test_zeros_after_a_power_cut_are_no_records(left: Left, zeros: int, data: Any):
    """The size of a file may reach the disk before its content."""
    _, log = left.again("killed")
    whole = log.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    log.write_bytes(whole[:cut] + bytes(zeros))
    before = [record for record, end in zip(REQUESTS, left.ends, strict=True) if end <= cut]
    try:
        found = reopened(left.copy)
    except Damaged:
        assert cut not in [0, *left.ends]  # a part of a record, and then zeros
    else:
        # Zeros may be what the rest of a record is.
        assert found[: len(before)] == before
        assert found == REQUESTS[: len(found)]


@pytest.mark.parametrize("name", ["killed", "live"])
@given(data=st.data())
@settings(DISTURBED, max_examples=150)
def test_a_changed_bit_is_never_read_as_a_record(left: Left, name: str, data: Any):
    file, log = left.again(name)
    chosen = log if name == "killed" else file
    changed = bytearray(chosen.read_bytes())
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    chosen.write_bytes(changed)
    try:
        found = reopened(left.copy)
    except Damaged as error:
        assert "journal.db" in str(error)
    else:
        assert found == REQUESTS or (name == "killed" and found == REQUESTS[:-1] and place >= left.ends[-2])


@given(data=st.data())
@DISTURBED
def test_a_cut_database_is_damaged(left: Left, data: Any):
    file, _ = left.again("live")
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(Damaged, match="journal.db"):
        reopened(left.copy)


@pytest.mark.parametrize("changed", [b"\xc5ayload", b"pqyload"])
def test_tables_that_cannot_be_read_are_damaged(left: Left, changed: bytes):
    file, _ = left.again("live")
    file.write_bytes(file.read_bytes().replace(b"payload", changed, 1))
    with pytest.raises(Damaged, match="journal.db"):
        reopened(left.copy)


def test_a_killed_run_without_its_log_stays_damaged(left: Left):
    _, log = left.again("killed")
    log.unlink()
    for _ in range(2):
        with pytest.raises(Damaged, match="has lost its log journal.db-wal"):
            reopened(left.copy)


# --- requests, results, snapshots ---


def test_a_run_is_recovered_from_snapshot_and_later_requests(tmp_path: Path):
    journal = open_run(tmp_path, snapshot_every=2, num_results=2)
    for seq in (1, 3, 2, 4):  # in the order of arrival
        assert journal.request(seq, STEP, b"%d" % seq)
    for seq in (1, 2, 3):
        assert journal.snapshot_due == (seq > 2)
        journal.result(seq, b"r%d" % seq)
    weights = torch.arange(6.0)
    journal.snapshot(3, {"a": weights[:2], "b": weights[2:].view(2, 2), "step": torch.tensor(3)})
    journal.request(5, "load_weights", b"5")
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.db", "snapshot-4.safetensors"]

    journal = open_run(tmp_path, is_new=False)
    recovered = journal.recover()
    assert recovered.next_number == 4
    assert recovered.state is not None and recovered.state["b"].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert [(r.seq, r.kind, r.payload) for r in recovered.requests] == [(4, STEP, b"4"), (5, "load_weights", b"5")]
    assert recovered.results == {2: b"r2", 3: b"r3"}
    journal.close()


@pytest.mark.parametrize(("sync", "level"), [(False, 1), (True, 2)])
def test_with_sync_every_commit_waits_for_the_disk(tmp_path: Path, sync: bool, level: int):
    """Levels of SQLite: 1 waits when the log is emptied, which keeps the tables whole in a power cut, 2 at every commit as well."""
    journal = open_run(tmp_path, sync=sync)
    assert journal._database.read("PRAGMA synchronous") == [(level,)]
    assert journal._database.read("PRAGMA journal_mode") == [("wal",)]
    journal.close()


def test_a_retried_request_is_written_once(tmp_path: Path):
    journal = open_run(tmp_path)
    assert journal.request(1, STEP, b"first")
    assert not journal.request(1, STEP, b"retry")
    journal.snapshot(1, {"w": torch.ones(1)}, wait=True)
    assert not journal.request(1, STEP, b"retry after the snapshot")
    journal.close()
    assert not open_run(tmp_path).request(1, STEP, b"retry after the restart")


def test_a_result_is_written_once(tmp_path: Path):
    journal = open_run(tmp_path)
    journal.request(1, STEP, b"")
    journal.result(1, b"before the restart")
    journal.close()
    journal = open_run(tmp_path)
    journal.result(1, b"carried out again")
    journal.close()
    assert open_run(tmp_path).recover().results[1] == b"before the restart"


def test_a_snapshot_is_due_after_many_bytes(tmp_path: Path):
    journal = open_run(tmp_path, max_bytes=100_000)
    journal.request(1, "forward_backward", bytes(90_000))
    assert not journal.snapshot_due
    journal.request(2, "forward_backward", bytes(90_000))
    assert journal.snapshot_due
    journal.snapshot(1, {"w": torch.ones(1)}, wait=True)
    assert not journal.snapshot_due  # request 2 is kept, and is not counted again


@pytest.mark.parametrize("left", ["snapshot-9.safetensors", ".unfinished-snapshot-9.safetensors"])
def test_what_a_killed_snapshot_leaves_is_removed(tmp_path: Path, left: str):
    journal = open_run(tmp_path)
    journal.request(1, STEP, b"1")
    journal.close()
    (tmp_path / left).write_bytes(b"part")
    assert [record.seq for record in reopened(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["journal.db"]


def test_a_missing_or_damaged_snapshot_is_an_error(tmp_path: Path):
    journal = open_run(tmp_path)
    journal.snapshot(3, {"w": torch.ones(1)}, wait=True)
    journal.close()
    path = tmp_path / "snapshot-4.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(Damaged, match="snapshot-4.safetensors cannot be read"):
            reopened(tmp_path)
        path.unlink(missing_ok=True)


# --- full disk ---


def test_a_full_disk_fails_the_request_and_leaves_the_journal_usable(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    journal = open_run(tmp_path)
    journal.request(1, STEP, b"1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "journal.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, hard))  # writes past this size fail, after a part of them
    try:
        with pytest.raises(StorageError, match="MiB are free"):
            journal.request(2, STEP, bytes(100_000))
        journal.snapshot(1, {"w": torch.zeros(100_000)})
        journal.wait()
        assert "No snapshot" in caplog.text
        with pytest.raises(StorageError):
            journal.snapshot(1, {"w": torch.zeros(100_000)}, wait=True)
        journal.request(3, STEP, b"3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.request(2, STEP, bytes(100_000))
    journal.close()
    assert [record.seq for record in reopened(tmp_path)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["journal.db"]


# --- kill -9 ---


def train(folder: Path, acknowledge: int) -> None:
    """A run whose state is the sum of its requests; every number is written to the pipe when it is acknowledged."""
    journal = open_run(folder, snapshot_every=3)
    recovered = journal.recover()
    total = float(recovered.state["total"]) if recovered.state else 0.0
    last = recovered.next_number - 1
    for record in recovered.requests:
        total, last = total + record.seq, record.seq
    while True:
        last += 1
        journal.request(last, STEP, bytes(20_000))
        os.write(acknowledge, last.to_bytes(8, "little"))
        total += last
        journal.result(last, {})
        if journal.snapshot_due:
            journal.snapshot(last, {"total": torch.tensor(total)})


def test_kill_at_any_moment_loses_no_acknowledged_request(tmp_path: Path):
    rng = random.Random(0)
    fork = multiprocessing.get_context("fork")
    acknowledged = 0
    for _ in range(12):
        read, write = os.pipe()
        process = fork.Process(target=train, args=(tmp_path, write))
        process.start()
        os.close(write)
        for _ in range(rng.randrange(1, 25)):
            acknowledged = int.from_bytes(os.read(read, 8), "little")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while rest := os.read(read, 8):
            acknowledged = int.from_bytes(rest, "little")
        os.close(read)

        journal = open_run(tmp_path)
        found = journal.recover()
        journal.close()
        seqs = [record.seq for record in found.requests]
        last = seqs[-1] if seqs else found.next_number - 1
        assert seqs == list(range(found.next_number, last + 1))
        assert last in (acknowledged, acknowledged + 1)  # written, and not yet acknowledged
        state = float(found.state["total"]) if found.state else 0.0
        assert state + sum(seqs) == last * (last + 1) / 2
