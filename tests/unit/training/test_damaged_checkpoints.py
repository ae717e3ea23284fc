"""Damaged and forged checkpoints: the newest undamaged one is loaded, and no file makes the loader run code or look elsewhere.

The two fuzzers damage the files of real checkpoints. The first leaves the manifest as it was, as a failing disk does; the second
writes the manifest again, as a stranger would. `--fuzz-cases 5000 --fuzz-seed 7` makes them longer.
"""

import io
import json
import logging
import os
import pickle
import random
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ludic.training.checkpoint.manifest import MANIFEST, finish_folder, problem_with, read_manifest
from ludic.training.checkpoint.export import export_checkpoint
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.model_files import base_fingerprint, is_peft
from ludic.training.checkpoint.shard_files import (
    model_tensors,
    optimizer_rest,
    optimizer_tensors,
    write_description,
    write_rank_state,
    write_shards,
)
from ludic.training.checkpoint.state_files import write_optimizer, write_state
from ludic.training.checkpoint.tensor_files import read_tensor_file
from ludic.types import ConfigError
from tests.conftest import Fuzz
from tests.unit.inference.local.tiny_models import new_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS = (1, 2, 3)


# --- checkpoints --------------------------------------------------------------------------------------------------


def module() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))


def full() -> Any:
    return new_model("llama-mha-tied").requires_grad_(True)


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    return peft.get_peft_model(new_model("llama-mha-tied"), peft.LoraConfig(r=2, target_modules=["q_proj"]))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def save(root: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    state = {"at": step, "numbers": torch.full((3,), float(step))}
    CheckpointManager(CheckpointConfig(root, max_to_keep=None, best_metric="score")).save(
        step, model=model, optimizer=optimizer, state=state, metrics={"score": 1.0 / step}
    )


def save_sharded(root: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As ShardedCheckpointManager does on one rank."""
    folder = root / f"step_{step:06d}"
    folder.mkdir(parents=True)
    saved = optimizer.state_dict()
    write_state(folder, step, {"at": step}, {"score": 1.0 / step})
    write_optimizer(optimizer_rest(saved), folder)
    write_description(model, base_fingerprint(model) if is_peft(model) else {}, folder)
    write_rank_state(folder, 0, {"numbers": torch.full((3,), float(step))})
    write_shards(model_tensors(model) | optimizer_tensors(saved), folder, None)
    finish_folder(folder, {"step": step, "serial": step, "format": "sharded", "world_size": 1})


@dataclass
class Saved:
    """A folder of three checkpoints, and what is in them."""

    root: Path
    model: Any
    optimizer: torch.optim.Optimizer
    content: dict[int, list[torch.Tensor]]

    def copy(self, target: Path) -> Path:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.root, target, symlinks=True)
        return target

    def load(self, root: Path) -> dict[str, Any]:
        return CheckpointManager(CheckpointConfig(root)).load(model=self.model, optimizer=self.optimizer)

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether model, optimizer and state are what was saved at the step that the state names."""
        found = [*values(self.model, self.optimizer), state["numbers"]]
        expected = self.content[state["step"]]
        return state["at"] == state["step"] and all(map(torch.equal, found, expected)) and len(found) == len(expected)


def values(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [slots["exp_avg"] for slots in optimizer.state_dict()["state"].values()]
    return [tensor.detach().clone() for tensor in [*model.state_dict().values(), *moments]]


KINDS = {
    "module": (module, save),
    "full": (full, save),
    "lora": (lora, save),
    "sharded": (module, save_sharded),
    "sharded lora": (lora, save_sharded),
}


def make_saved(root: Path, kind: str) -> Saved:
    make, save_as = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    optimizer = adamw(model)
    content = {}
    for step in STEPS:
        train(model, optimizer, step)
        save_as(root, step, model, optimizer)
        content[step] = [*values(model, optimizer), torch.full((3,), float(step))]
    return Saved(root, model, optimizer, content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def get(kind: str) -> Saved:
        if kind not in made:
            made[kind] = make_saved(tmp_path_factory.mktemp("saved") / "checkpoints", kind)
        return made[kind]

    return get


# --- what must not happen -----------------------------------------------------------------------------------------

WATCHED: list[tuple[str, Any]] | None = None
FORBIDDEN = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHED is not None and (event in FORBIDDEN or (event == "open" and "outside" in str(arguments[0]))):
        WATCHED.append((event, arguments))


sys.addaudithook(note)  # it stays, and sees nothing while WATCHED is None


@contextmanager
def nothing_is_run_or_opened_outside() -> Iterator[None]:
    global WATCHED
    WATCHED = []
    try:
        yield
        assert WATCHED == []
    finally:
        WATCHED = None


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# --- the fuzzers --------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def damage(folder: Path, rng: random.Random, outside: Path) -> str:
    """Do something to one file of a folder; what and to which."""
    file = rng.choice(files_of(folder))
    content = bytearray(file.read_bytes())
    place = rng.randrange(len(content)) if content else 0
    kind = rng.choice(
        [*["bit"] * 6, "cut", "zeros", "noise", "swap", "gone", "folder", "link", "empty", "longer", "extra"]
    )
    if kind == "bit" and content:
        content[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind in ("zeros", "noise"):
        length = min(rng.choice([1, 16, 512]), len(content) - place)
        content[place : place + length] = bytes(length) if kind == "zeros" else rng.randbytes(length)
    elif kind == "longer":
        content += rng.randbytes(rng.choice([1, 64]))
    elif kind == "empty":
        content.clear()
    if kind == "swap":
        other = rng.choice(files_of(folder.parent if rng.random() < 0.5 else folder))
        content, taken = bytearray(other.read_bytes()), bytes(content)
        other.unlink()
        other.write_bytes(taken)
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(outside / "file")
    elif kind == "extra":
        file.write_bytes(content)
        name = rng.choice(
            ["model2.safetensors", "model.safetensors", "state.pt", "rank_00000.pt", "optimizer.pt", "x.json"]
        )
        extra = rng.choice([file.parent, folder]) / name
        if not extra.exists():
            extra.write_bytes(rng.choice([content, b"", rng.randbytes(100)]))
    elif kind != "gone":
        file.write_bytes(content)
    return f"{kind} in {file.relative_to(folder.parent)} at {place}"


def is_as_saved(folder: Path, original: Path) -> bool:
    """Whether every file that was saved is there with its bytes."""
    return all(
        (there := folder / file.relative_to(original)).is_file() and there.read_bytes() == file.read_bytes()
        for file in files_of(original)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fuzz_the_newest_undamaged_checkpoint_is_loaded(kind: str, saved, tmp_path: Path, caplog, fuzz: Fuzz):
    given: Saved = saved(kind)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"{}")
    for case in range(fuzz.cases(15)):
        rng = fuzz.rng(case)
        root = given.copy(tmp_path / "checkpoints")
        done = [
            damage(root / f"step_{rng.choice(STEPS[-2:]):06d}", rng, outside) for _ in range(rng.choice([1, 1, 2, 4]))
        ]
        where = f"{kind}: {', '.join(done)}. {fuzz.at(case)}"
        intact = [s for s in STEPS if is_as_saved(root / f"step_{s:06d}", given.root / f"step_{s:06d}")]
        caplog.clear()
        with caplog.at_level(logging.WARNING), nothing_is_run_or_opened_outside():
            try:
                state = given.load(root)
            except CheckpointError as error:
                assert not intact and "no undamaged checkpoint" in str(error), where
                continue
            except Exception as error:
                raise AssertionError(where) from error
        assert given.holds(state), where
        # Spaces in a manifest are no damage, nor is a file that is copied over itself.
        assert state["step"] >= max(intact, default=0), where
        for skipped in STEPS[state["step"] :]:
            (warning,) = [r for r in caplog.messages if f"step_{skipped:06d}: " in r and r.startswith("Skipping")]
            assert len(warning.split(": ", 1)[1]) > 10, where


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fuzz_a_forged_checkpoint_is_loaded_or_refused(kind: str, saved, tmp_path: Path, fuzz: Fuzz):
    """The manifest fits, so only the content can be at fault; most of it is refused, none of it is run."""
    given: Saved = saved(kind)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(pickle.dumps(Trap(tmp_path / "was run")))
    for case in range(fuzz.cases(15)):
        rng = fuzz.rng(case)
        root = given.copy(tmp_path / "checkpoints")
        folder = root / f"step_{STEPS[-1]:06d}"
        facts = {
            name: value
            for name, value in json.loads((folder / MANIFEST).read_text()).items()
            if name not in ("files", "crc32")
        }
        (folder / MANIFEST).unlink()
        done = damage(folder, rng, outside)
        finish_folder(folder, facts)
        manager = CheckpointManager(CheckpointConfig(root))
        try:
            with nothing_is_run_or_opened_outside():
                manager.load(model=given.model, optimizer=given.optimizer, path=folder)
        except (CheckpointError, ConfigError):
            pass
        except Exception as error:
            raise AssertionError(f"{kind}: {done}. {fuzz.at(case)}") from error
        assert not (tmp_path / "was run").exists()
        if kind == "sharded":
            shutil.rmtree(tmp_path / "exported", ignore_errors=True)
            try:
                export_checkpoint(folder, tmp_path / "exported", with_optimizer=True)
            except (CheckpointError, ConfigError):
                pass
            except Exception as error:
                raise AssertionError(f"{kind}, exported: {done}. {fuzz.at(case)}") from error


# --- the manifest and the pointer to the best ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_checksum", [True, False], ids=["with a checksum", "as older versions wrote it"])
def test_any_single_bit_of_a_manifest_may_be_wrong(saved, tmp_path: Path, has_checksum: bool):
    root = saved("module").copy(tmp_path / "checkpoints")
    file = root / "step_000003" / MANIFEST
    manifest = json.loads(file.read_text())
    if not has_checksum:
        del manifest["crc32"]
        file.write_text(json.dumps(manifest, indent=1))
    content = file.read_bytes()
    assert read_manifest(file.parent) == {name: value for name, value in manifest.items() if name != "crc32"}
    manager = CheckpointManager(CheckpointConfig(root))
    for bit in range(0, 8 * len(content), 3):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        found = read_manifest(file.parent)
        assert found is None or not has_checksum or found == read_without_checksum(content), bit
        if bit % 300 == 0:
            assert manager.find().name in ("step_000002", "step_000003"), bit


def read_without_checksum(content: bytes) -> Any:
    facts = json.loads(content)
    del facts["crc32"]
    return facts


BEST = {
    "zeros": bytes(50),
    "nothing": b"",
    "half": b'{"path": "step_0000',
    "no text": b"\xff\xfe",
    "a list": b"[1]",
    "other names": b'{"path": "step_000001"}',
    "no number": b'{"path": "step_000001", "step": 1, "metric": "score", "value": "1"}',
    "another number": b'{"path": "step_000001", "step": 1, "metric": "score", "value": 9e9}',
    "another metric": b'{"path": "step_000001", "step": 1, "metric": "scorf", "value": 1.0}',
    "a checkpoint that is gone": b'{"path": "step_000009", "step": 9, "metric": "score", "value": 1.0}',
    "a folder elsewhere": b'{"path": "../../outside", "step": 1, "metric": "score", "value": 1.0}',
    "an absolute path": b'{"path": "/", "step": 1, "metric": "score", "value": 1.0}',
}


@pytest.mark.parametrize("name", BEST)
@pytest.mark.parametrize("score", [0.1, 5.0, None])
def test_a_damaged_pointer_to_the_best_is_written_again_by_the_next_save(
    saved, tmp_path: Path, caplog, name: str, score
):
    root = saved("module").copy(tmp_path / "checkpoints")
    (root / "best.json").write_bytes(BEST[name])
    manager = CheckpointManager(CheckpointConfig(root, max_to_keep=1, best_metric="score"))
    assert manager.best() == root / "step_000001", "its own metrics say so"
    assert all(str(root / "best.json") in message for message in caplog.messages) and caplog.messages
    manager.save(4, model=module(), metrics={} if score is None else {"score": score})
    caplog.clear()
    best = "step_000004" if score == 5.0 else "step_000001"
    assert manager.best() == root / best and not caplog.messages
    assert json.loads((root / "best.json").read_text())["path"] == best
    assert sorted(path.name for path in root.glob("step_*")) == sorted({best, "step_000004"})


def test_a_manifest_of_another_step_is_damage(saved, tmp_path: Path, caplog):
    root = saved("module").copy(tmp_path / "checkpoints")
    shutil.rmtree(root / "step_000003")
    shutil.copytree(root / "step_000001", root / "step_000003")
    assert CheckpointManager(CheckpointConfig(root)).find() == root / "step_000002"
    assert "step_000003: its manifest.json is that of another step" in caplog.text


def test_without_an_undamaged_checkpoint_the_error_says_so(saved, tmp_path: Path):
    root = saved("module").copy(tmp_path / "checkpoints")
    for file in root.glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="There is no undamaged checkpoint"):
        saved("module").load(root)


# --- forged sharded checkpoints -----------------------------------------------------------------------------------


def forge(saved: Callable[[str], Saved], root: Path, change: Callable[[Metadata, Path], Any]) -> Path:
    """A sharded checkpoint whose index is another one, and whose manifest fits."""
    folder = saved("sharded").copy(root / "checkpoints") / "step_000003"
    index = folder / "shards" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    other = change(metadata, folder / "shards")
    index.write_bytes(pickle.dumps(metadata if other is None else other))
    (folder / MANIFEST).unlink()
    finish_folder(folder, {"step": 3, "serial": 3, "format": "sharded", "world_size": 1})
    assert problem_with(folder, checksums=True) is None or (folder / "shards" / "link").exists()
    return folder


def put_code_into_a_bytes_entry(metadata: Metadata, shards: Path) -> None:
    """torch unpickles what is said to be bytes; the fields of a tensor get it past the code that asks for a size."""
    payload = io.BytesIO()
    torch.save(Trap(shards.parents[2] / "was run"), payload)
    (shards / "__1_0.distcp").write_bytes(payload.getvalue())
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    entry = BytesStorageMetadata()
    entry.__dict__ = dict(vars(metadata.state_dict_metadata[name]))
    metadata.state_dict_metadata[name] = entry
    (index,) = [key for key in metadata.storage_data if key.fqn == name]
    del metadata.storage_data[index]
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("__1_0.distcp", 0, len(payload.getvalue()))


def first(metadata: Metadata) -> tuple[TensorStorageMetadata, MetadataIndex, _StorageInfo]:
    index, info = next((key, value) for key, value in metadata.storage_data.items() if key.fqn == "model.0.weight")
    entry = metadata.state_dict_metadata["model.0.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry, index, info


def read_elsewhere(path: Callable[[Path], str]) -> Callable[[Metadata, Path], None]:
    def change(metadata: Metadata, shards: Path) -> None:
        outside = shards.parents[2] / "outside"
        outside.mkdir()
        (outside / "file").write_bytes((shards / "__0_0.distcp").read_bytes())
        first(metadata)[2].relative_path = path(outside)
        if path(outside) == "link":
            (shards / "link").symlink_to(outside / "file")

    return change


def of_size(size: tuple[int, ...]) -> Callable[[Metadata, Path], None]:
    def change(metadata: Metadata, shards: Path) -> None:
        entry = first(metadata)[0]
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))]

    return change


def at(**fields: Any) -> Callable[[Metadata, Path], None]:
    return lambda metadata, shards: first(metadata)[2].__dict__.update(fields)


def everything_at_one_place(metadata: Metadata, shards: Path) -> None:
    entry, index, info = first(metadata)
    for number in range(1000):
        name = f"model.{number}.more"
        metadata.state_dict_metadata[name] = entry
        metadata.storage_data[MetadataIndex(name, index.offset)] = info


FORGED: dict[str, Callable[[Metadata, Path], Any]] = {
    "code in an entry of bytes": put_code_into_a_bytes_entry,
    "code instead of an index": lambda metadata, shards: Trap(shards.parents[2] / "was run"),
    "code as a size": lambda metadata, shards: setattr(first(metadata)[0], "size", Trap(shards.parents[2] / "was run")),
    "code as a key": lambda metadata, shards: metadata.storage_data.update({Trap(shards.parents[2] / "was run"): 1}),
    "a file beside the folder": read_elsewhere(lambda outside: "../../../outside/file"),
    "an absolute path": read_elsewhere(lambda outside: str(outside / "file")),
    "a link that leads out": read_elsewhere(lambda outside: "link"),
    "the folder itself": at(relative_path="."),
    "no text as a path": at(relative_path=b"__0_0.distcp"),
    "an encoded tensor": at(transform_descriptors=["zstd"]),
    "an offset beyond the file": at(offset=10**15),
    "a length beyond the file": at(length=10**15),
    "a negative offset": at(offset=-1),
    "terabytes": of_size((10**7, 10**7)),
    "more than 64 bits": of_size((2**62, 2**62)),
    "another shape": of_size((3, 5)),
    "fewer numbers": of_size((1, 1)),
    "a number that is true": at(offset=True),
    "no chunks": lambda metadata, shards: setattr(first(metadata)[0], "chunks", []),
    "one chunk twice": lambda metadata, shards: first(metadata)[0].chunks.append(first(metadata)[0].chunks[0]),
    "another dtype": lambda metadata, shards: setattr(first(metadata)[0], "properties", TensorProperties(torch.int32)),
    "one place for a thousand tensors": everything_at_one_place,
    "a tensor without a place": lambda metadata, shards: metadata.storage_data.clear(),
    "no tensors": lambda metadata, shards: Metadata({}),
    "a list": lambda metadata, shards: [[]],
}  # fmt: skip


REFUSED = "cannot be read|another model|in this model|link to a file outside"


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_index_is_refused_before_anything_is_loaded(name: str, saved, tmp_path: Path):
    folder = forge(saved, tmp_path, FORGED[name])
    model = module()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with nothing_is_run_or_opened_outside():
        with pytest.raises((CheckpointError, ConfigError), match=REFUSED):
            CheckpointManager(CheckpointConfig(folder.parent)).load(model=model, path=folder)
        with pytest.raises((CheckpointError, ConfigError)):
            export_checkpoint(folder, tmp_path / "exported", with_optimizer=True)
    assert not (tmp_path / "was run").exists() and not (tmp_path / "exported").exists()
    assert all(map(torch.equal, model.state_dict().values(), before))


def test_an_index_as_torch_writes_it_is_read(saved, tmp_path: Path):
    folder = forge(saved, tmp_path, lambda metadata, shards: None)
    given = saved("sharded")
    assert given.holds(
        CheckpointManager(CheckpointConfig(tmp_path)).load(model=given.model, optimizer=given.optimizer, path=folder)
    )


# --- tensor files -------------------------------------------------------------------------------------------------


def zipped(pickled: bytes, *storages: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for number, storage in enumerate(storages):
            archive.writestr(f"archive/data/{number}", storage)
    return file.getvalue()


def tensor_pickle(count: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """What torch.save writes for a float tensor, with numbers of one's own."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", count) if type(obj) is Storage else None

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, None)

    file = io.BytesIO()
    Pickler(file, 2).dump(Tensor())
    return file.getvalue()


@pytest.mark.parametrize("mapped", [False, True])
def test_what_torch_saves_is_read_as_torch_reads_it(tmp_path: Path, mapped: bool):
    shared = torch.arange(12.0)
    dtypes = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]
    value = {
        "views": [shared[2:], shared.view(3, 4).T],
        "dtypes": [torch.ones(3).to(dtype) for dtype in dtypes],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": module().state_dict(),
        "plain": (None, True, 2.5, -5, 2**40, 10**30, "ü", ["a", {}, ()]),
        3: torch.Size([1, 2]),
    }
    torch.save(value, tmp_path / "x.pt")
    found, expected = (
        read_tensor_file(tmp_path / "x.pt", mapped=mapped),
        torch.load(tmp_path / "x.pt", weights_only=True),
    )
    assert str(found) == str(expected) and type(found["module"]) is type(expected["module"])
    assert found["module"]._metadata == expected["module"]._metadata
    found["views"][0][0] = 100.0
    assert found["views"][1][2, 0] == 100.0, "tensors that share their numbers still do"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (zipped(pickle.dumps({"a": Trap(Path("was run"))})), "which is not read"),
        (zipped(pickle.dumps(Trap(Path("was run")), 0)), "does not belong there|stands where"),
        (zipped(pickle.dumps(random.Random(0))), "which is not read"),
        (zipped(tensor_pickle(10**12, (10**12,), (1,)), bytes(8)), "are said to be in the 8 bytes"),
        (zipped(tensor_pickle(2, (3,), (1,)), bytes(8)), "larger than its storage"),
        (zipped(tensor_pickle(2, (2,), (10**6,)), bytes(8)), "larger than its storage"),
        (zipped(tensor_pickle(2, (1,), (1,), offset=7), bytes(8)), "larger than its storage"),
        (zipped(tensor_pickle(2, (-1,), (1,)), bytes(8)), "are no sizes"),
        (zipped(tensor_pickle(2**20, (2**20,), (1,)), bytes(2**22), method=zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(b"\x80\x02" + b"r" + struct.pack("<I", 2**32 - 1) + b"."), "cannot be read"),
        (zipped(b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"."), "cannot be read"),
        (zipped(b"(" * 5000 + b"."), "cannot be read"),
        (b"PK\x05\x06" + bytes(18), "cannot be read"),
        (pickle.dumps(Trap(Path("was run"))), "cannot be read"),
        (b"", "cannot be read"),
    ],
)  # fmt: skip
def test_a_forged_tensor_file_is_refused(tmp_path: Path, monkeypatch, content: bytes, reason: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(content)
    with nothing_is_run_or_opened_outside(), pytest.raises(CheckpointError, match=reason):
        read_tensor_file(tmp_path / "x.pt")
    assert not Path("was run").exists()
