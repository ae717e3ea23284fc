"""The data folder of a Tinker server: records, recovered runs and checkpoints, as the next server finds them."""

import json
import logging
import resource
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from ludic.models.adapters import AdapterSpec, LoraAdapter
from ludic.types import ConfigError
from ludic_tinker.server.futures import Failure
from ludic_tinker.server.records import Checkpoint, CheckpointPath, Refused, Run, Sampler, Session
from ludic_tinker.server.storage.checkpoints import ADAPTER, CONFIG
from ludic_tinker.server.storage.database import StorageError
from ludic_tinker.server.storage.store import DiskStore
from tests.unit.training.bandit import tiny_llama

SPEC = AdapterSpec(rank=4, seed=3)
RUN = Run(
    id="s1:train:0", session="s1", tenant="ann", base_model="tiny", spec=SPEC, created=5.0, user_metadata={"a": "b"}
)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Any]:
    """Opens the store of one folder again and again, as restarts do."""
    opened: list[DiskStore] = []

    def restart(**settings: Any) -> DiskStore:
        while opened:
            opened.pop().close()
        opened.append(DiskStore(tmp_path / "data", base_model="tiny", **settings))
        return opened[-1]

    yield restart
    while opened:
        opened.pop().close()


def state(value: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([value])}


def test_records_are_there_after_a_restart_and_only_for_their_tenant(stores: Any):
    store = stores()
    session = Session(id="s1", tenant="ann", created=1.0, tags=("x",), user_metadata={"k": "v"}, display_name="mine")
    sampler = Sampler(id="s1:sample:0", session="s1", tenant="ann", path=None, created=2.0)
    store.sessions.put(session)
    store.add_run(RUN, "create_model")
    store.samplers.put(sampler)
    store.sessions.put(replace(session, finished="success", detail="all done"))

    store = stores()
    found = store.sessions.get("s1", "ann")
    assert (found.user_metadata, found.finished, found.detail) == ({"k": "v"}, "success", "all done")
    assert store.runs.get(RUN.id) == RUN
    assert store.samplers.listed("ann") == [sampler]
    for table, key in ((store.sessions, "s1"), (store.runs, RUN.id), (store.samplers, sampler.id)):
        assert table.listed("bob") == []
        with pytest.raises(Refused, match="There is no") as refused:
            table.get(key, "bob")
        assert refused.value.status == 404
    store.samplers.remove(sampler.id)
    assert stores().samplers.listed() == []


def test_a_failed_request_is_recovered_as_failed(stores: Any):
    store = stores(snapshot_every=1)
    store.add_run(RUN, "create_model")
    failures = [Failure("no such loss"), Failure("internal", is_users=False)]
    for number, failure in enumerate(failures, start=1):
        store.journal.accept(RUN.id, number, "forward_backward", b"")
        store.journal.executed(RUN.id, number, failure, lambda: state(0))
    [(_, found)] = stores().recover()
    assert found.state is None
    assert [found.results[number] for number in (1, 2)] == failures


def test_a_pass_makes_no_snapshot_while_a_later_one_may_share_its_batch(stores: Any):
    store = stores(max_journal_bytes=1)
    store.add_run(RUN, "create_model")
    for number in (1, 2):
        store.journal.accept(RUN.id, number, "forward_backward", b"data")
    store.journal.executed(RUN.id, 1, b"", lambda: pytest.fail("the state was read"))
    store.journal.executed(RUN.id, 2, b"", lambda: state(2))
    [(_, found)] = stores().recover()
    assert (found.next_number, found.state, found.results) == (3, state(2), {1: b"", 2: b""})


def test_a_pass_that_is_carried_out_again_makes_no_snapshot_before_the_last_request(stores: Any):
    """All requests have results from before the restart, and two passes may share a batch again."""
    kinds = ["forward_backward", "forward_backward", "optim_step"]
    results = [b"", b"", {"metrics": {}}]
    store = stores(snapshot_every=2)
    store.add_run(RUN, "create_model")
    for number, (kind, result) in enumerate(zip(kinds, results, strict=True), start=1):
        store.journal.accept(RUN.id, number, kind, b"")
        store.journal.executed(RUN.id, number, result, lambda: pytest.fail("one step is not enough"))
    store = stores(snapshot_every=1)
    [(_, found)] = store.recover()
    assert found.next_number == 0 and len(found.requests) == 4
    for number in (1, 2):
        store.journal.executed(RUN.id, number, b"", lambda: pytest.fail("the state was read"))
    store.journal.executed(RUN.id, 3, {"metrics": {}}, lambda: state(3))
    [(_, found)] = stores().recover()
    assert (found.next_number, found.state) == (4, state(3))


def test_a_loaded_checkpoint_is_not_read_again(stores: Any):
    """It may be overwritten between the load and the restart."""
    store = stores()
    store.add_run(RUN, "create_model")
    store.journal.accept(RUN.id, 1, "load_weights", b"")
    store.journal.executed(RUN.id, 1, {}, lambda: state(7))
    [(_, found)] = stores().recover()
    assert (found.next_number, found.state, found.requests) == (2, state(7), ())
    assert found.results == {1: {}}


def journals(store: DiskStore) -> list[Path]:
    return list(store.folder.glob("runs/*/journal.db*"))


def test_an_ended_run_is_listed_and_not_recovered(stores: Any):
    store = stores()
    store.add_run(RUN, "create_model")
    store.journal.accept(RUN.id, 1, "optim_step", b"")
    store.end_run(RUN.id)
    store = stores()
    assert store.recover() == []
    assert [run.id for run in store.runs.listed("ann")] == [RUN.id]
    assert not (store.folder / "runs" / RUN.id).exists() and not journals(store)
    assert store.last_request(RUN.id) == pytest.approx(time.time(), abs=60)


def test_requests_of_a_run_whose_creation_was_not_answered_are_dropped(stores: Any):
    """The server was killed after it wrote request 0 and before it wrote the run; the client asks again."""
    store = stores()
    store.journal.begin(RUN.id)
    store.journal.accept(RUN.id, 0, "create_model", b"")
    assert journals(store)
    store = stores()
    assert store.recover() == [] and not journals(store)


@pytest.mark.parametrize("damage", ["record", "database", "log", "no log"])
def test_a_damaged_run_is_left_out_and_named(
    stores: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    """Other runs, of other tenants too, go on."""
    store = stores()
    store.add_run(RUN, "create_model")
    store.add_run(other := replace(RUN, id="s1:train:1"), "create_model")
    for number in (1, 2):
        store.journal.accept(RUN.id, number, "optim_step", b"the payload")
    if "log" not in damage:
        store.close()
    folder = tmp_path / "killed"
    shutil.copytree(store.folder, folder)
    file, log = (folder / "runs" / RUN.id / name for name in ("journal.db", "journal.db-wal"))
    if damage == "record":
        file.write_bytes(file.read_bytes().replace(b"the payload", b"thepayload!"))
    elif damage == "database":
        file.write_bytes(b"something else" * 100)
    elif damage == "log":
        data = bytearray(log.read_bytes())
        data[100] ^= 1
        log.write_bytes(data)
    else:
        log.unlink()
    store = DiskStore(folder, base_model="tiny")
    with caplog.at_level(logging.ERROR):
        assert [run for run, _ in store.recover()] == [other]
    assert list(store.damaged) == [RUN.id] and RUN.id in caplog.text
    assert "wrong checksum" in store.damaged[RUN.id] or damage != "record"
    store.journal.accept(other.id, 1, "optim_step", b"")
    store.close()


@pytest.mark.parametrize("damage", ["cut", "zeros", "no database", "log is gone", "log is changed"])
def test_a_damaged_database_is_set_aside_and_checkpoints_stay(
    stores: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    store = stores()
    store.add_run(RUN, "create_model")
    store.checkpoints.save(*saved("weights", "one"), overwrite=False)
    if "log" not in damage:
        store.close()
    folder = tmp_path / "killed"
    shutil.copytree(store.folder, folder)
    file, log = folder / "server.db", folder / "server.db-wal"
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "zeros":
        file.write_bytes(data[:4096] + bytes(len(data) - 4096))
    elif damage == "no database":
        file.write_bytes(b"something else" * 100)
    elif damage == "log is gone":
        log.unlink()
    else:
        changed = bytearray(log.read_bytes())
        changed[100] ^= 1
        log.write_bytes(changed)
    for attempt in range(2):
        started = DiskStore(folder, base_model="tiny")
        assert started.recover() == [] and started.runs.listed() == []
        assert [c.path.name for c in started.checkpoints.listed("ann")] == ["one"]
        assert len(list(folder.glob("server.db.damaged-*"))) == 1
        assert caplog.text.count("It is set aside") == 1
        if attempt == 0:
            started.add_run(RUN, "create_model")
            started.end_run(RUN.id)
            started.runs.remove(RUN.id)
        started.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_of_another_format_says_what_to_do(tmp_path: Path, version: int):
    (tmp_path / "server.json").write_text(json.dumps({"format": version, "base_model": "tiny", "secret": "00"}))
    with pytest.raises(
        ConfigError, match="another version of Ludic, whose journals are no longer read. Choose another"
    ):
        DiskStore(tmp_path, base_model="tiny")


def test_a_folder_has_one_server_and_one_base_model(tmp_path: Path):
    store = DiskStore(tmp_path, base_model="tiny")
    with pytest.raises(ConfigError, match="Another server uses"):
        DiskStore(tmp_path, base_model="tiny")
    store.close()
    with pytest.raises(ConfigError, match="base model 'tiny'.*serves 'large'"):
        DiskStore(tmp_path, base_model="large")
    assert DiskStore(tmp_path, base_model="tiny").secret == store.secret


def test_a_full_disk_is_an_error_of_the_request(stores: Any):
    """RLIMIT_FSIZE makes writes fail as a full disk does."""
    store = stores()
    store.add_run(RUN, "create_model")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sampler = Sampler(id="x", session="s1", tenant="ann", path=None, created=2.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        for write in (
            lambda: store.samplers.put(sampler),
            lambda: store.journal.accept(RUN.id, 1, "optim_step", b""),
            lambda: store.add_run(replace(RUN, id="s1:train:1"), "create_model"),
            lambda: store.checkpoints.save(*saved("weights", "one"), overwrite=False),
        ):
            with pytest.raises(StorageError, match="MiB are free"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.samplers.listed() == store.checkpoints.listed("ann") == []
    assert [run.id for run in store.runs.listed()] == [RUN.id]
    store.samplers.put(sampler)
    store.journal.accept(RUN.id, 1, "optim_step", b"")
    store = stores()
    assert store.samplers.listed() == [sampler]
    assert [len(found.requests) for _, found in store.recover()] == [2]


# --- checkpoints ---


def saved(folder: str, name: str, **fields: Any) -> tuple[Checkpoint, dict[str, Tensor]]:
    path = CheckpointPath.parse(f"tinker://{RUN.id}/{folder}/{name}")
    known: dict[str, Any] = {"tenant": "ann", "base_model": "tiny", "spec": SPEC, "created": 9.0, "number": 4}
    tensors = LoraAdapter.create(tiny_llama(), SPEC).named()
    if path.kind == "training":
        tensors = {f"weights/{name}": tensor for name, tensor in tensors.items()}
        tensors["num_steps"] = torch.tensor(3)
    return Checkpoint(path=path, **{**known, **fields}), tensors


def test_a_checkpoint_is_loaded_as_it_was_saved(stores: Any):
    store = stores()
    checkpoint, tensors = saved("weights", "step-1", user_metadata={"k": "v"})
    store.checkpoints.save(checkpoint, tensors, overwrite=False)
    store = stores()
    loaded, found = store.checkpoints.load(checkpoint.path)
    assert loaded == checkpoint == store.checkpoints.get(checkpoint.path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert store.checkpoints.size(checkpoint.path) > sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize(
    ("sync", "is_unnamed", "is_synced"), [(False, False, True), (False, True, False), (True, True, True)]
)
def test_only_unnamed_weights_without_sync_do_not_wait_for_the_disk(
    stores: Any, monkeypatch: pytest.MonkeyPatch, sync: bool, is_unnamed: bool, is_synced: bool
):
    store, synced = stores(sync=sync), []
    monkeypatch.setattr("ludic_tinker.server.storage.checkpoints.sync", lambda path: synced.append(path.name))
    store.checkpoints.save(*saved("sampler_weights", "one", is_unnamed=is_unnamed), overwrite=False)
    assert ("adapter_model.safetensors" in synced) == is_synced


def test_peft_loads_the_files_of_a_checkpoint(stores: Any, tmp_path: Path):
    store = stores()
    checkpoint, tensors = saved("sampler_weights", "final")
    weight = next(tensor for name, tensor in tensors.items() if "q_proj.lora_B" in name)
    weight.fill_(0.5)
    store.checkpoints.save(checkpoint, tensors, overwrite=False)
    store.checkpoints.archive(checkpoint.path, tmp_path / "adapter.tar.gz")
    with tarfile.open(tmp_path / "adapter.tar.gz") as tar:
        assert tar.getnames() == [CONFIG, ADAPTER]
        tar.extractall(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    loaded = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert loaded.keys() == {name for name in tensors if "lora_" in name}
    assert all(torch.equal(loaded[name], tensors[name]) for name in loaded)


def test_a_repeated_save_finds_its_checkpoint_and_another_is_refused(stores: Any):
    store = stores()
    first, tensors = saved("weights", "latest")
    store.checkpoints.save(first, tensors, overwrite=False)
    store.checkpoints.save(first, {**tensors, "num_steps": torch.tensor(99)}, overwrite=False)
    assert store.checkpoints.load(first.path)[1]["num_steps"] == 3
    later, _ = saved("weights", "latest", number=5)
    with pytest.raises(Refused, match="exists") as refused:
        store.checkpoints.save(later, tensors, overwrite=False)
    assert refused.value.status == 409
    store.checkpoints.save(later, {**tensors, "num_steps": torch.tensor(5)}, overwrite=True)
    assert stores().checkpoints.load(first.path)[1]["num_steps"] == 5


def test_a_checkpoint_expires_and_is_deleted(stores: Any):
    store = stores()
    checkpoint, tensors = saved("weights", "soon", expires=time.time() - 1)
    store.checkpoints.save(checkpoint, tensors, overwrite=False)
    with pytest.raises(Refused):
        store.checkpoints.get(checkpoint.path)
    kept, _ = saved("weights", "kept", number=6)
    store.checkpoints.save(kept, tensors, overwrite=False)
    folder = store.folder / "runs" / RUN.id / "weights"
    assert [path.name for path in folder.iterdir()] == ["kept"]
    store.checkpoints.set_ttl(kept.path, 3600)
    assert stores().checkpoints.get(kept.path).expires == pytest.approx(time.time() + 3600, abs=60)
    store = stores()
    store.checkpoints.set_ttl(kept.path, None)
    assert stores().checkpoints.get(kept.path).expires is None
    store = stores()
    store.checkpoints.delete(kept.path)
    assert list(folder.iterdir()) == []
    assert stores().checkpoints.listed("ann") == []


@pytest.mark.parametrize(
    ("left", "kept"),
    [([".unfinished-x"], []), ([".replaced-x"], ["x"]), (["x", ".replaced-x", ".unfinished-x"], ["x"])],
)
def test_what_a_killed_save_leaves_is_put_right(stores: Any, left: list[str], kept: list[str]):
    store = stores()
    checkpoint, tensors = saved("weights", "x")
    store.checkpoints.save(checkpoint, tensors, overwrite=False)
    folder = store.folder / "runs" / RUN.id / "weights"
    store.close()
    contents = {file.name: file.read_bytes() for file in (folder / "x").iterdir()}
    for file in (folder / "x").iterdir():
        file.unlink()
    (folder / "x").rmdir()
    for name in left:
        (folder / name).mkdir()
        for file_name, data in contents.items():
            (folder / name / file_name).write_bytes(data)
    found = stores().checkpoints.listed("ann")
    assert [c.path.name for c in found] == [path.name for path in folder.iterdir()] == kept
