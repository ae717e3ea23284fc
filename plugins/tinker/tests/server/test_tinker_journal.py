"""The journal of training runs: no acknowledged record is lost, none is invented, whatever moment the process dies at."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ludic_tinker.server.storage.database import Damaged, Database, StorageError
from ludic_tinker.server.storage.journal import Journal, Record, Recovered

pytestmark = pytest.mark.slow

RUN, STEP = "s1:train:0", "optim_step"
REQUESTS = [Record(seq, STEP, bytes([seq]) * (20 if seq % 2 else 9000)) for seq in range(6)]
DISTURBED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class OneRun:
    """The journal of one run, in `folder`/run."""

    def __init__(self, folder: Path, *, is_new: bool = False, sync: bool = False, **settings: Any) -> None:
        self.journal = Journal(lambda run: folder / "run", sync=sync, **settings)
        if is_new:
            self.journal.begin(RUN)

    @property
    def database(self) -> Database:
        return self.journal._databases[RUN]

    def request(self, number: int, payload: bytes = b"", kind: str = STEP) -> None:
        self.journal.accept(RUN, number, kind, payload)

    def done(self, number: int, value: float = 0.0) -> None:
        """The request is carried out; the state after it is `value`."""
        self.journal.executed(RUN, number, b"r%d" % number, lambda: {"w": torch.tensor([value])})
        self.journal.wait(RUN)

    def close(self) -> None:
        self.journal.close()


def recovered(folder: Path) -> Recovered:
    """What a restarted server finds."""
    run = OneRun(folder)
    try:
        return run.journal.recover(RUN)
    except Damaged:
        if RUN not in run.journal._databases or run.database.read("SELECT 1 FROM journal LIMIT 1"):
            raise
        return Recovered(0, None, (), {})  # the kill came before its first request, so no client was told of it
    finally:
        run.close()


def reopened(folder: Path) -> list[Record]:
    return list(recovered(folder).requests)


class Left:
    """The files that a killed server leaves after six requests, and those of one that was closed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder / "copy"
        run = OneRun(folder / "live", is_new=True)
        log = folder / "live/run/journal.db-wal"
        self.ends = []
        """The size of the log after each request."""
        for record in REQUESTS:
            run.request(record.seq, record.payload)
            self.ends.append(log.stat().st_size)
        shutil.copytree(folder / "live", folder / "killed")
        run.close()

    def again(self, name: str) -> tuple[Path, Path]:
        """Database and log of a fresh copy."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.folder / name, self.copy)
        return self.copy / "run/journal.db", self.copy / "run/journal.db-wal"


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

    run, added = OneRun(left.copy, is_new=True), Record(len(kept), STEP, b"after the restart")
    run.request(added.seq, added.payload)
    run.close()
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
    run = OneRun(tmp_path, is_new=True, snapshot_every=2, num_results=2)
    for number in (0, 1, 3, 2, 4):  # in the order of arrival
        run.request(number, b"%d" % number)
    run.request(1, b"a retry")
    snapshots = []
    for number in (0, 1, 2, 3):
        run.done(number, number)
        snapshots += [path.name for path in tmp_path.glob("run/snapshot-*")]
    run.journal.executed(RUN, 3, b"carried out again", dict)
    run.request(5, b"5", "load_weights")
    run.close()
    assert snapshots == ["snapshot-2.safetensors", "snapshot-2.safetensors", "snapshot-4.safetensors"]

    found = recovered(tmp_path)
    assert (found.next_number, found.state) == (4, {"w": torch.tensor([3.0])})
    assert found.requests == (Record(4, STEP, b"4"), Record(5, "load_weights", b"5"))
    assert found.results == {2: b"r2", 3: b"r3"}


@pytest.mark.parametrize(("sync", "level"), [(False, 1), (True, 2)])
def test_with_sync_every_commit_waits_for_the_disk(tmp_path: Path, sync: bool, level: int):
    """Levels of SQLite: 1 waits when the log is emptied, which keeps the tables whole in a power cut, 2 at every commit as well."""
    run = OneRun(tmp_path, is_new=True, sync=sync)
    assert run.database.read("PRAGMA synchronous") == [(level,)]
    assert run.database.read("PRAGMA journal_mode") == [("wal",)]
    run.close()


def test_a_result_is_written_once(tmp_path: Path):
    run = OneRun(tmp_path, is_new=True)
    run.request(0)
    for result in (b"before the restart", b"carried out again"):
        run.journal.executed(RUN, 0, result, dict)
    run.close()
    assert recovered(tmp_path).results == {0: b"before the restart"}


def test_a_snapshot_is_due_after_many_bytes_and_leaves_the_log_short(tmp_path: Path):
    run = OneRun(tmp_path, is_new=True, max_bytes=100_000)
    for number, is_due in enumerate((False, True, False, True)):
        run.request(number, bytes(90_000), "forward_backward")
        run.done(number)
        assert (tmp_path / f"run/snapshot-{number + 1}.safetensors").exists() == is_due
        assert (run.database.log_bytes() == 0) == is_due
    run.close()


def test_files_of_a_killed_snapshot_are_put_right(tmp_path: Path):
    """A part of one is removed; a whole one counts although the requests that it contains were not dropped."""
    run, folder = OneRun(tmp_path, is_new=True), tmp_path / "run"
    for number in range(3):
        run.request(number)
    run.close()
    (folder / ".unfinished-snapshot-9.safetensors").write_bytes(b"part")
    assert [record.seq for record in reopened(tmp_path)] == [0, 1, 2]
    for number in (1, 2):
        save_file({"w": torch.tensor([float(number)])}, folder / f"snapshot-{number}.safetensors")
    for _ in range(2):
        found = recovered(tmp_path)
        assert (found.next_number, found.state) == (2, {"w": torch.tensor([2.0])})
        assert [record.seq for record in found.requests] == [2]
        assert [path.name for path in folder.glob("*snapshot-*")] == ["snapshot-2.safetensors"]


def test_a_missing_or_damaged_snapshot_is_an_error(tmp_path: Path):
    run = OneRun(tmp_path, is_new=True, snapshot_every=1)
    run.request(0)
    run.done(0)
    run.close()
    path = tmp_path / "run/snapshot-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for said in ("snapshot-1.safetensors cannot be read", "run has lost its snapshot"):
        with pytest.raises(Damaged, match=said):
            reopened(tmp_path)
        path.unlink(missing_ok=True)


def test_an_older_snapshot_does_not_stand_in_for_a_missing_one(tmp_path: Path):
    """The requests between the two are dropped."""
    run, folder = OneRun(tmp_path, is_new=True, snapshot_every=2), tmp_path / "run"
    for number in range(4):
        run.request(number)
        run.done(number)
        if number == 1:
            shutil.copy(folder / "snapshot-2.safetensors", tmp_path)
    run.close()
    (folder / "snapshot-4.safetensors").unlink()
    shutil.copy(tmp_path / "snapshot-2.safetensors", folder)
    with pytest.raises(Damaged, match="run has lost its snapshot"):
        reopened(tmp_path)


def test_the_room_of_a_run_is_free_again_when_it_ends(tmp_path: Path):
    run = OneRun(tmp_path, is_new=True)
    run.request(0, bytes(100_000))
    run.journal.snapshot(RUN, 0, {"w": torch.zeros(2)}, wait=True)
    run.journal.end(RUN)
    run.journal.executed(RUN, 0, b"", lambda: pytest.fail("the state was read"))
    assert list(tmp_path.iterdir()) == []


# --- full disk ---


def test_a_full_disk_fails_the_request_and_leaves_the_journal_usable(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = OneRun(tmp_path, is_new=True)
    run.request(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = run.database.log_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, hard))  # writes past this size fail, after a part of them
    try:
        with pytest.raises(StorageError, match="MiB are free"):
            run.request(1, bytes(100_000))
        run.journal.snapshot(RUN, 0, {"w": torch.zeros(100_000)})
        run.journal.wait(RUN)
        assert "No snapshot" in caplog.text
        with pytest.raises(StorageError):
            run.journal.snapshot(RUN, 0, {"w": torch.zeros(100_000)}, wait=True)
        run.request(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run.request(1, bytes(100_000))
    run.close()
    assert [record.seq for record in reopened(tmp_path)] == [0, 1, 2]
    assert list(tmp_path.glob("run/*snapshot-*")) == []


# --- kill -9 ---


def train(folder: Path, acknowledge: int) -> None:
    """A run whose state is the sum of its requests; every number is written to the pipe when it is acknowledged."""
    found = recovered(folder)
    total = float(found.state["total"]) if found.state else 0.0
    last = found.next_number - 1
    for record in found.requests:
        total, last = total + record.seq, record.seq
    run = OneRun(folder, is_new=True, snapshot_every=3)
    while True:
        last += 1
        run.request(last, bytes(20_000))
        os.write(acknowledge, last.to_bytes(8, "little"))
        total += last
        state = {"total": torch.tensor(total)}
        run.journal.executed(RUN, last, {}, lambda state=state: state)


def test_kill_at_any_moment_loses_no_acknowledged_request(tmp_path: Path):
    rng = random.Random(0)
    fork = multiprocessing.get_context("fork")
    acknowledged = 0
    OneRun(tmp_path, is_new=True).close()
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

        found = recovered(tmp_path)
        numbers = [record.seq for record in found.requests]
        last = numbers[-1] if numbers else found.next_number - 1
        assert numbers == list(range(found.next_number, last + 1))
        assert last in (acknowledged, acknowledged + 1)  # written, and not yet acknowledged
        state = float(found.state["total"]) if found.state else 0.0
        assert state + sum(numbers) == last * (last + 1) / 2
