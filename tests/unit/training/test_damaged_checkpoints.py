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

from ludic.training.checkpoint import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.durable import MANIFEST, finish_folder, problem_with
from ludic.training.export import export_checkpoint
from ludic.training.model_files import base_fingerprint, is_peft
from ludic.training.sharded_files import (
    model_tensors,
    optimizer_rest,
    optimizer_tensors,
    write_description,
    write_rank_state,
    write_shards,
)
from ludic.training.state_files import write_optimizer, write_state
from ludic.training.tensor_files import read_tensor_file
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
    kind = rng.choice([*["bit"] * 6, "cut", "zeros", "noise", "swap", "gone", "folder", "link", "empty", "longer", "extra"])
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
        name = rng.choice(["model2.safetensors", "model.safetensors", "state.pt", "rank_00000.pt", "optimizer.pt", "x.json"])
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


@pytest.mark.parametrize("kind", KINDS)
def test_fuzz_the_newest_undamaged_checkpoint_is_loaded(kind: str, saved, tmp_path: Path, caplog, fuzz: Fuzz):
    given: Saved = saved(kind)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"{}")
    for case in range(fuzz.cases(24)):
        rng = fuzz.rng(case)
        root = given.copy(tmp_path / "checkpoints")
        done = [damage(root / f"step_{rng.choice(STEPS[-2:]):06d}", rng, outside) for _ in range(rng.choice([1, 1, 2, 4]))]
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


@pytest.mark.parametrize("kind", KINDS)
def test_fuzz_a_forged_checkpoint_is_loaded_or_refused(kind: str, saved, tmp_path: Path, fuzz: Fuzz):
    """The manifest fits, so only the content can be at fault; most of it is refused, none of it is run."""
    given: Saved = saved(kind)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(pickle.dumps(Trap(tmp_path / "was run")))
    for case in range(fuzz.cases(24)):
        rng = fuzz.rng(case)
        root = given.copy(tmp_path / "checkpoints")
        folder = root / f"step_{STEPS[-1]:06d}"
        facts = {name: value for name, value in json.loads((folder / MANIFEST).read_text()).items() if name not in ("files", "crc32")}
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
