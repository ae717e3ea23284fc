"""Damaged and forged checkpoints: the newest undamaged one is loaded, and no file makes the loader run code or look elsewhere.

The two fuzzers damage the files of real checkpoints. The first leaves the manifest as it was, as a failing disk does; the second
writes the manifest again, as a stranger would. `--fuzz-cases 5000 --fuzz-seed 7` makes them longer.
"""

import json
import logging
import os
import pickle
import random
import shutil
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ludic.training.checkpoint.export import export_checkpoint
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.manifest import MANIFEST, finish_folder, problem_with, read_manifest
from ludic.training.checkpoint.model_files import base_fingerprint, is_peft, model_tensors, write_description
from ludic.training.checkpoint.rank_files import encoded, read_values, write_rank_files
from ludic.types import ConfigError
from tests.fuzz import Fuzz
from tests.unit.inference.local.tiny_models import new_model

pytestmark = pytest.mark.slow

STEPS = (1, 2, 3)
FIRST, SECOND = "ranks/00000-000.safetensors", "ranks/00001-000.safetensors"


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


def save(root: Path, step: int, model: Any, optimizer: torch.optim.Optimizer, kind: Any = CheckpointManager) -> Path:
    state = {"at": step, "numbers": torch.full((3,), float(step))}
    checkpoints = kind(CheckpointConfig(root, max_to_keep=None, best_metric="score"))
    path: Path = checkpoints.save(step, model=model, optimizer=optimizer, state=state, metrics={"score": 1.0 / step})
    return path


class AsRanks(CheckpointManager):
    """Writes what a manager of ranks writes on one rank."""

    def _write_model(self, model: Any, folder: Path) -> dict[str, torch.Tensor]:
        write_description(model, base_fingerprint(model) if is_peft(model) else {}, folder)
        return model_tensors(model)


def save_sharded(root: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As two ranks do, each with a half of every tensor that has rows."""
    folder = save(root, step, model, optimizer, AsRanks)
    first, second = folder / FIRST, folder / SECOND
    whole = load_file(first)
    cut = {name: tensor for name, tensor in whole.items() if not name.startswith("values") and tensor.ndim}
    rows = {name: len(tensor) // 2 for name, tensor in cut.items()}
    shapes = {name: list(tensor.shape) for name, tensor in cut.items()}
    zeros = {name: [0] * (tensor.ndim - 1) for name, tensor in cut.items()}
    parts = [
        {name: (shapes[name], [0, *zeros[name]]) for name in cut},
        {name: (shapes[name], [rows[name], *zeros[name]]) for name in cut},
    ]
    low = {name: tensor[: rows[name]].clone() if name in cut else tensor for name, tensor in whole.items()}
    high = {name: tensor[rows[name] :].clone() for name, tensor in cut.items()} | encoded({"own": {}})
    save_file(low, first, metadata={"parts": json.dumps(parts[0])})
    save_file(high, second, metadata={"parts": json.dumps(parts[1])})
    finish_folder(folder, step=step, serial=step)


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
        found = [*weights_and_moments(self.model, self.optimizer), state["numbers"]]
        expected = self.content[state["step"]]
        return state["at"] == state["step"] and all(map(torch.equal, found, expected)) and len(found) == len(expected)


def weights_and_moments(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
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
        content[step] = [*weights_and_moments(model, optimizer), torch.full((3,), float(step))]
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


EXTRA = [
    "model2.safetensors", "model.safetensors", "00000-000.safetensors", "00001-000.safetensors", "00000-001.safetensors",
    "adapter_config.json", "x.json",
]  # fmt: skip


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
        name = rng.choice(EXTRA)
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
        (folder / MANIFEST).unlink()
        done = damage(folder, rng, outside)
        finish_folder(folder, step=STEPS[-1], serial=STEPS[-1])
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
def test_any_flipped_bit_of_a_manifest_is_damage(saved, tmp_path: Path):
    root = saved("module").copy(tmp_path / "checkpoints")
    file = root / "step_000003" / MANIFEST
    content = file.read_bytes()
    written = {name: value for name, value in json.loads(content).items() if name != "crc32"}
    assert read_manifest(file.parent) == written
    manager = CheckpointManager(CheckpointConfig(root))
    for bit in range(0, 8 * len(content), 3):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        found = read_manifest(file.parent)
        assert found is None or found == written, bit
        if bit % 300 == 0:
            assert manager.find().name in ("step_000002", "step_000003"), bit


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """With a checksum that fits."""
    facts = json.loads((folder / MANIFEST).read_text())
    del facts["crc32"]
    change(facts)
    checksum = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({**facts, "crc32": checksum}))


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file beside the folder": lambda facts: facts["files"].update({"../file": {"size": 0, "crc32": 0}}),
    "an absolute path": lambda facts: facts["files"].update({"/dev/null": {"size": 0, "crc32": 0}}),
    "a path with a zero byte": lambda facts: facts["files"].update({"a\0b": {"size": 0, "crc32": 0}}),
    "a size that is true": lambda facts: facts["files"].update({MANIFEST: {"size": True, "crc32": 0}}),
    "a negative step": lambda facts: facts.update(step=-1),
    "another fact": lambda facts: facts.update(world_size=2),
    "no files": lambda facts: facts.pop("files"),
    "a list of files": lambda facts: facts.update(files=[]),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_forged_manifest_is_damage(name: str, saved, tmp_path: Path):
    folder = saved("module").copy(tmp_path / "checkpoints") / "step_000003"
    rewrite_manifest(folder, MANIFESTS[name])
    assert problem_with(folder, checksums=True) == "its manifest.json is damaged"


@pytest.mark.parametrize("format", [None, "sharded", 3])
def test_checkpoint_of_another_format_is_skipped_with_one_warning(saved, tmp_path: Path, caplog, format: Any):
    root = saved("module").copy(tmp_path / "checkpoints")
    rewrite_manifest(root / "step_000003", lambda facts: facts.update(format=format))
    assert saved("module").load(root)["step"] == 2
    (warning,) = [message for message in caplog.messages if "step_000003" in message]
    assert "another version of Ludic wrote it, in a format that this version does not read" in warning
    with pytest.raises(CheckpointError, match="another version of Ludic"):
        CheckpointManager(CheckpointConfig(root)).load(model=module(), step=3)


@pytest.mark.parametrize("content", [b"", b'{"path": "../../outside", "step": 1, "metric": "score", "value": 9e9}'])
@pytest.mark.parametrize(("score", "best"), [(0.1, "step_000001"), (5.0, "step_000004"), (None, "step_000001")])
def test_best_json_is_only_written(saved, tmp_path: Path, content: bytes, score: float | None, best: str):
    root = saved("module").copy(tmp_path / "checkpoints")
    (root / "best.json").write_bytes(content)
    manager = CheckpointManager(CheckpointConfig(root, max_to_keep=1, best_metric="score"))
    assert manager.best() == root / "step_000001", "by the metrics in the checkpoints"
    manager.save(4, model=module(), metrics={} if score is None else {"score": score})
    assert manager.best() == root / best and json.loads((root / "best.json").read_text())["path"] == best
    assert sorted(path.name for path in root.glob("step_*")) == sorted({best, "step_000004"})


def test_manifest_of_another_step_is_damage(saved, tmp_path: Path, caplog):
    root = saved("module").copy(tmp_path / "checkpoints")
    shutil.rmtree(root / "step_000003")
    shutil.copytree(root / "step_000001", root / "step_000003")
    assert CheckpointManager(CheckpointConfig(root)).find() == root / "step_000002"
    assert "step_000003: its manifest.json is that of another step" in caplog.text


def test_load_is_refused_if_every_checkpoint_is_damaged(saved, tmp_path: Path):
    root = saved("module").copy(tmp_path / "checkpoints")
    for file in root.glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="There is no undamaged checkpoint"):
        saved("module").load(root)


# --- forged rank files --------------------------------------------------------------------------------------------

Header = dict[str, Any]
WEIGHT = "model.0.weight"


def forge(saved: Callable[[str], Saved], root: Path, change: Callable[[Path], Any]) -> Path:
    """A checkpoint of two ranks in which something else stands, and whose manifest fits."""
    folder = saved("sharded").copy(root / "checkpoints") / "step_000003"
    (folder / MANIFEST).unlink()
    change(folder)
    finish_folder(folder, step=3, serial=3)
    assert problem_with(folder, checksums=True) is None or (folder / SECOND).is_symlink()
    return folder


def header(change: Callable[[Header], Any], file: str = SECOND) -> Callable[[Path], None]:
    """Change the header of a rank file; the bytes of its tensors stay."""

    def forged(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        found = json.loads(content[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return forged


def parts(change: Callable[[Header], Any]) -> Callable[[Path], None]:
    """Change which parts of which tensors the second rank says to have."""

    def forged(found: Header) -> None:
        said = json.loads(found["__metadata__"]["parts"])
        other = change(said)
        found["__metadata__"]["parts"] = json.dumps(said if other is None else other)

    return header(forged)


def tensor(**fields: Any) -> Callable[[Path], None]:
    return header(lambda found: found[WEIGHT].update(fields))


def values(content: bytes) -> Callable[[Path], None]:
    """Other values of rank 0."""

    def forged(folder: Path) -> None:
        tensors = load_file(folder / FIRST)
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        save_file({**tensors, "values": text}, folder / FIRST, metadata={"parts": "{}"})

    return forged


def put_link(folder: Path) -> None:
    outside = folder.parents[1] / "outside"
    outside.mkdir()
    (folder / SECOND).rename(outside / "file")
    (folder / SECOND).symlink_to(outside / "file")


def put_pickle(file: str) -> Callable[[Path], None]:
    def forged(folder: Path) -> None:
        (folder / file).write_bytes(pickle.dumps(Trap(folder.parents[1] / "was run")))

    return forged


def everything_at_one_place(found: Header) -> None:
    for number in range(1000):
        found[f"model.{number}.more"] = found[WEIGHT]


FORGED: dict[str, Callable[[Path], Any]] = {
    "code instead of a rank file": put_pickle(SECOND),
    "code instead of the first rank file": put_pickle(FIRST),
    "code instead of values": lambda folder: values(pickle.dumps(Trap(folder.parents[1] / "was run")))(folder),
    "a link that leads out": put_link,
    "a missing rank": lambda folder: (folder / SECOND).unlink(),
    "one part twice": lambda folder: shutil.copy(folder / SECOND, folder / "ranks" / "00002-000.safetensors"),
    "an offset beyond the file": tensor(data_offsets=[10**15, 10**15 + 36]),
    "a length beyond the file": tensor(data_offsets=[0, 10**15]),
    "a negative offset": tensor(data_offsets=[-1, 35]),
    "a number that is true": tensor(data_offsets=[True, 36]),
    "terabytes in a file": tensor(shape=[10**7, 10**7]),
    "more than 64 bits in a file": tensor(shape=[2**62, 2**62]),
    "another shape in a file": tensor(shape=[9]),
    "fewer numbers in a file": tensor(shape=[1, 1]),
    "another dtype": tensor(dtype="I32"),
    "no dtype": tensor(dtype="code"),
    "one place for a thousand tensors": header(everything_at_one_place),
    "a header that is a list": header(lambda found: found.update({WEIGHT: []})),
    "no parts": header(lambda found: found.pop("__metadata__")),
    "parts that are no JSON": header(lambda found: found["__metadata__"].update(parts="{")),
    "parts that are a list": parts(lambda said: [1]),
    "parts that nest": header(lambda found: found["__metadata__"].update(parts="[" * 100_000)),
    "a part without a place": parts(lambda said: said.pop(WEIGHT) and None),
    "a part of terabytes": parts(lambda said: said.update({WEIGHT: [[10**7, 10**7], [2, 0]]})),
    "a part of more than 64 bits": parts(lambda said: said.update({WEIGHT: [[2**70, 3], [2, 0]]})),
    "a part beyond its tensor": parts(lambda said: said.update({WEIGHT: [[5, 3], [3, 0]]})),
    "a part before its tensor": parts(lambda said: said.update({WEIGHT: [[5, 3], [-1, 0]]})),
    "a part over another": parts(lambda said: said.update({WEIGHT: [[5, 3], [0, 0]]})),
    "a part that is true": parts(lambda said: said.update({WEIGHT: [[5, 3], [True, 0]]})),
    "a part of other dimensions": parts(lambda said: said.update({WEIGHT: [[15], [6]]})),
    "a place that is text": parts(lambda said: said.update({WEIGHT: "53"})),
    "a tensor of another size": parts(lambda said: said.update({WEIGHT: [[6, 3], [2, 0]]})),
    "no values": header(lambda found: found.update(other=found.pop("values")), FIRST),
    "values that are no JSON": values(b"{"),
    "values that are a list": values(b"[1]"),
    "values that nest": values(b'{"own": ' + b'{"list": [' * 50_000),
    "a table that is a number": values(b'{"own": 1}'),
    "a table that is a list": values(b'{"shared": {"list": []}, "own": {"dict": []}}'),
    "a value of an unknown kind": values(b'{"own": {"dict": [["rng", {"posix.mkdir": ["x"]}]]}}'),
    "a value of two kinds": values(b'{"own": {"dict": [["rng", {"list": [], "tuple": []}]]}}'),
    "a list without a kind": values(b'{"own": {"dict": [["rng", [1]]]}}'),
    "a tensor that is not there": values(b'{"own": {"dict": [["rng", {"tensor": 10}]]}}'),
    "a tensor by name": values(b'{"own": {"dict": [["rng", {"tensor": "0.weight"}]]}}'),
    "a key that is a list": values(b'{"own": {"dict": [[{"list": []}, 1]]}}'),
    "a pair of three": values(b'{"own": {"dict": [["a", 1, 2]]}}'),
    "a number with letters": values(b'{"own": {"dict": [["rng", {"float": "x"}]]}}'),
}


REFUSED = "cannot be read|are not those of|in this model|link to a file outside"


@pytest.mark.parametrize("name", FORGED)
def test_forged_rank_file_is_refused_before_anything_is_loaded(name: str, saved, tmp_path: Path):
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


OPTIMIZERS = {
    "no groups": b'{"dict": [["state", {"dict": []}]]}',
    "a state that is a list": b'{"dict": [["state", {"list": []}], ["param_groups", {"list": []}]]}',
    "groups that are numbers": b'{"dict": [["state", {"dict": []}], ["param_groups", {"list": [1]}]]}',
    "a state of no parameter": b'{"dict": [["state", {"dict": []}], ["param_groups", {"list": []}]]}',
    "nothing": b"null",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_forged_optimizer_is_refused(name: str, saved, tmp_path: Path):
    folder = saved("module").copy(tmp_path / "checkpoints") / "step_000003"
    (folder / MANIFEST).unlink()
    values(b'{"shared": {"dict": []}, "own": {"dict": []}, "optimizer": ' + OPTIMIZERS[name] + b"}")(folder)
    finish_folder(folder, step=3, serial=3)
    model = module()
    with pytest.raises(CheckpointError, match="does not fit|cannot be read|holds no optimizer"):
        CheckpointManager(CheckpointConfig(folder.parent)).load(model=model, optimizer=adamw(model), path=folder)


# --- values -------------------------------------------------------------------------------------------------------


def test_values_are_restored_with_their_types(tmp_path: Path):
    shared = torch.arange(12.0)
    dtypes = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]
    given = {
        "views": [shared[2:], shared.view(3, 4).T],
        "dtypes": [torch.ones(3).to(dtype) for dtype in dtypes],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": module().state_dict(),
        "plain": (None, True, 2.5, -5, 2**40, 10**30, "ü", ["a", {}, ()], -0.0, float("inf"), 5e-324),
        "by key": {3: 1, (1, "a"): {"dict": [], "_metadata": 2}, None: OrderedDict(x=1)},
    }
    write_rank_files(tmp_path, 0, encoded({"own": given}))
    found = read_values(tmp_path, 0)["own"]
    expected = {**given, "parameter": torch.ones(2)}
    assert str(found) == str(expected) and type(found["module"]) is OrderedDict
    assert found["module"]._metadata == given["module"]._metadata
    assert type(found["by key"][None]) is OrderedDict and type(found["by key"][1, "a"]) is dict
    shared[2] = 100.0
    assert found["views"][0][0] == 2.0 and str(read_values(tmp_path, 1)) == "{}"


def test_saving_refuses_a_tensor_that_safetensors_cannot_store(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"state\[x\[0\]\] is torch.complex128"):
        encoded({"own": {"x": [torch.ones(2, dtype=torch.complex128)]}})
    with pytest.raises(ConfigError, match=r"state\[x\] is a tensor of an unusual kind"):
        encoded({"own": {"x": torch.ones(2).to_sparse()}})


def test_rank_with_many_bytes_writes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ludic.training.checkpoint.rank_files._LARGEST_FILE", 100)
    model = module()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    folder = save(tmp_path, 1, model, optimizer)
    assert len(list((folder / "ranks").iterdir())) > 3
    before = weights_and_moments(model, optimizer)
    other = module()
    fresh = adamw(other)
    assert CheckpointManager(CheckpointConfig(tmp_path)).load(model=other, optimizer=fresh)["at"] == 1
    assert all(map(torch.equal, weights_and_moments(other, fresh), before))
