"""The journal of a training run: no acknowledged record is lost, none is invented, whatever moment the process dies at."""

import multiprocessing
import os
import random
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic_tinker.server.storage.journal import (
    FAILED,
    STEP,
    JournalDamaged,
    JournalFile,
    Record,
    RunJournal,
    StorageError,
)

pytestmark = pytest.mark.slow

RECORDS = st.lists(
    st.builds(
        Record,
        seq=st.integers(0, 2**40),
        kind=st.sampled_from(["forward_backward", STEP, "json", FAILED, ""]),
        payload=st.binary(max_size=60),
        is_result=st.booleans(),
    ),
    max_size=6,
)


def written(path: Path, records: list[Record]) -> tuple[bytes, list[int]]:
    """The bytes of a journal of these records, and the offset behind each."""
    path.unlink(missing_ok=True)
    file, ends = JournalFile(path), []
    for record in records:
        file.append(record)
        ends.append(file.size)
    file.close()
    return path.read_bytes(), ends


def reopened(path: Path) -> list[Record]:
    file = JournalFile(path)
    file.close()
    return file.records


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "journal-0.log"


@given(records=RECORDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_file_cut_at_any_byte_has_exactly_the_records_before_the_cut(path: Path, records: list[Record], data: Any):
    whole, ends = written(path, records)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = [record for record, end in zip(records, ends, strict=True) if end <= cut]
    assert reopened(path) == kept

    file, added = JournalFile(path), Record(7, STEP, b"after the restart")
    file.append(added)
    file.close()
    assert reopened(path) == [*kept, added]


@given(records=RECORDS, zeros=st.integers(0, 80), data=st.data())
@settings(max_examples=100, deadline=None)
def test_zeros_after_a_power_cut_are_no_records(path: Path, records: list[Record], zeros: int, data: Any):
    """The size of a file may reach the disk before its content."""
    whole, ends = written(path, records)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut] + bytes(zeros))
    before = [record for record, end in zip(records, ends, strict=True) if end <= cut]
    try:
        found = reopened(path)
    except JournalDamaged:
        assert cut not in [0, *ends]  # a part of a record, and then zeros
    else:
        # Zeros may be what the rest of a record is.
        assert found[: len(before)] == before
        assert found == records[: len(found)]


@given(records=RECORDS.filter(bool), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_changed_bit_is_never_read_as_a_record(path: Path, records: list[Record], data: Any):
    whole, ends = written(path, records)
    place = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :])
    hit = next(index for index, end in enumerate(ends) if place < end)
    try:
        found = reopened(path)
    except JournalDamaged as error:
        assert str(path) in str(error)
    else:
        assert hit == len(records) - 1, "acknowledged records behind it were dropped silently"
        assert found == records[:hit]


def test_dropping_an_unfinished_record_is_logged(path: Path, caplog: pytest.LogCaptureFixture):
    whole, _ = written(path, [Record(1, STEP, b"x" * 30)])
    path.write_bytes(whole + Record(2, STEP, b"y").encoded()[:-1])
    assert [record.seq for record in reopened(path)] == [1]
    assert "a request that was not acknowledged" in caplog.text


# --- requests, results, snapshots ---


def open_run(folder: Path, **settings: Any) -> RunJournal:
    folder.mkdir(parents=True, exist_ok=True)
    return RunJournal(folder, background=ThreadPoolExecutor(1), **settings)


def test_a_run_is_recovered_from_snapshot_and_later_requests(tmp_path: Path):
    journal = open_run(tmp_path, snapshot_every=2, num_results=2)
    for seq in (1, 3, 2, 4):  # in the order of arrival
        assert journal.request(seq, STEP, b"%d" % seq)
    for seq in (1, 2, 3):
        assert journal.snapshot_due == (seq > 2)
        journal.result(seq, "json", b"r%d" % seq)
    weights = torch.arange(6.0)
    journal.snapshot(3, {"a": weights[:2], "b": weights[2:].view(2, 2), "step": torch.tensor(3)})
    journal.request(5, "load_weights", b"5")
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-4.log", "snapshot-4.safetensors"]

    recovered = open_run(tmp_path).recover()
    assert recovered.first_seq == 4
    assert recovered.state is not None and recovered.state["b"].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert [(r.seq, r.kind, r.payload) for r in recovered.requests] == [(4, STEP, b"4"), (5, "load_weights", b"5")]
    assert {seq: r.payload for seq, r in recovered.results.items()} == {2: b"r2", 3: b"r3"}


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
    journal.result(1, "json", b"before the restart")
    journal.close()
    journal = open_run(tmp_path)
    journal.result(1, "json", b"carried out again")
    journal.close()
    assert open_run(tmp_path).recover().results[1].payload == b"before the restart"


def test_a_snapshot_is_due_after_many_bytes(tmp_path: Path):
    journal = open_run(tmp_path, max_bytes=1000)
    journal.request(1, "forward_backward", bytes(900))
    assert not journal.snapshot_due
    journal.request(2, "forward_backward", bytes(900))
    assert journal.snapshot_due
    journal.snapshot(1, {"w": torch.ones(1)}, wait=True)
    assert not journal.snapshot_due  # request 2 is kept, and is not counted again


@pytest.mark.parametrize(
    "left", ["snapshot-9.safetensors", ".unfinished-snapshot-9.safetensors", ".unfinished-journal-9.log"]
)
def test_what_a_killed_snapshot_leaves_is_removed(tmp_path: Path, left: str):
    journal = open_run(tmp_path)
    journal.request(1, STEP, b"1")
    journal.close()
    (tmp_path / left).write_bytes(b"part")
    assert [record.seq for record in open_run(tmp_path).recover().requests] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["journal-0.log"]


def test_a_missing_or_damaged_snapshot_is_an_error(tmp_path: Path):
    journal = open_run(tmp_path)
    journal.snapshot(3, {"w": torch.ones(1)}, wait=True)
    journal.close()
    path = tmp_path / "snapshot-4.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalDamaged, match="snapshot-4"):
        open_run(tmp_path).recover()
    path.unlink()
    with pytest.raises(JournalDamaged, match="not the snapshot"):
        open_run(tmp_path)


# --- full disk ---


def test_a_full_disk_fails_the_request_and_leaves_the_journal_usable(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    journal = open_run(tmp_path)
    journal.request(1, STEP, b"1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # writes past this size fail, after a part of them
    try:
        with pytest.raises(StorageError, match="MiB are free"):
            journal.request(2, STEP, bytes(1000))
        journal.snapshot(1, {"w": torch.zeros(1000)})
        journal.wait()
        assert "No snapshot" in caplog.text
        with pytest.raises(StorageError):
            journal.snapshot(1, {"w": torch.zeros(1000)}, wait=True)
        journal.request(3, STEP, b"3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.request(2, STEP, bytes(1000))
    journal.close()
    assert [record.seq for record in open_run(tmp_path).recover().requests] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["journal-0.log"]


# --- kill -9 ---


def train(folder: Path, acknowledge: int) -> None:
    """A run whose state is the sum of its requests; every number is written to the pipe when it is acknowledged."""
    journal = open_run(folder, snapshot_every=3)
    recovered = journal.recover()
    total = float(recovered.state["total"]) if recovered.state else 0.0
    last = recovered.first_seq - 1
    for record in recovered.requests:
        total, last = total + record.seq, record.seq
    while True:
        last += 1
        journal.request(last, STEP, bytes(20_000))
        os.write(acknowledge, last.to_bytes(8, "little"))
        total += last
        journal.result(last, "json", b"{}")
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
        last = seqs[-1] if seqs else found.first_seq - 1
        assert seqs == list(range(found.first_seq, last + 1))
        assert last in (acknowledged, acknowledged + 1)  # written, and not yet acknowledged
        state = float(found.state["total"]) if found.state else 0.0
        assert state + sum(seqs) == last * (last + 1) / 2
