"""Checkpoints of training runs: each a folder with the adapter as peft saves it, and for training also the optimizer's state.

    <name>/adapter_model.safetensors, adapter_config.json   readable by peft, transformers and vLLM
    <name>/state.safetensors                                the other tensors of the run, in checkpoints for training
    <name>/checkpoint.json                                  the `Checkpoint`

A folder gets its name when it is complete, so a killed server leaves no half checkpoint.
"""

import dataclasses
import json
import logging
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ludic.models.adapters import LoraAdapter
from ludic.util.files import UNFINISHED, replacing, sync
from ludic_tinker.server.records import Checkpoint, CheckpointPath, Refused
from ludic_tinker.server.storage.database import StorageError
from ludic_tinker.server.storage.journal import own_tensors

logger = logging.getLogger(__name__)

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_STATE, _META = "state.safetensors", "checkpoint.json"
_REPLACED = ".replaced-"
_WEIGHTS = "weights/"
"""Begins the names of the adapter's weights in the state of a run; the rest is peft's name."""


class Checkpoints:
    """All checkpoints under the folder of runs. Thread-safe."""

    def __init__(self, runs: Path, *, sync: bool = False) -> None:
        """`sync`: wait for the disk also for weights that only sampling sessions know; a killed server leaves them anyway."""
        self._runs, self._syncs_all = runs, sync
        self._lock = threading.RLock()
        self._all: dict[CheckpointPath, Checkpoint] = {}
        for folder in runs.glob("*/*/"):
            _clean(folder)
            for file in folder.glob(f"*/{_META}"):
                try:
                    checkpoint = msgspec.json.decode(file.read_bytes(), type=Checkpoint)
                except (OSError, msgspec.MsgspecError, RecursionError) as error:
                    logger.warning("The checkpoint %s is left out: %s", file.parent, error)
                else:
                    self._all[checkpoint.path] = checkpoint
        self.purge()

    # --- writing ---

    def save(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, overwrite: bool) -> None:
        """Write a checkpoint: the state of a run (`TrainingRun.state`) for training, else the adapter's weights by peft's names.

        The same request again, after a restart, finds its checkpoint. Another checkpoint of this name is Refused(409), unless
        `overwrite`.
        """
        with self._lock:
            self.purge()
            known = self._all.get(checkpoint.path)
            if known is not None and known.number == checkpoint.number:
                return
            if known is not None and not overwrite:
                raise Refused(
                    409, f"{checkpoint.path} exists. Choose another name, delete it, or save with overwrite=True."
                )
            prefix = _prefix(checkpoint.path)
            adapter = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            others = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
            is_synced = self._syncs_all or not checkpoint.is_unnamed
            with self._written(self._folder(checkpoint.path), is_synced=is_synced) as folder:
                save_file(own_tensors(adapter), folder / ADAPTER)
                (folder / CONFIG).write_text(json.dumps(_peft_config(checkpoint, adapter), indent=1))
                if others:
                    save_file(own_tensors(others), folder / _STATE)
                (folder / _META).write_bytes(_encoded(checkpoint))
            self._all[checkpoint.path] = checkpoint

    @contextmanager
    def _written(self, target: Path, *, is_synced: bool) -> Iterator[Path]:
        """A folder to write to, which then takes the place of `target`. After an error nothing has changed."""
        unfinished, replaced = target.with_name(UNFINISHED + target.name), target.with_name(_REPLACED + target.name)
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            yield unfinished
            for file in unfinished.iterdir() if is_synced else ():
                sync(file)
            if target.exists():  # a folder cannot replace another in one step; after a kill `_clean` brings it back
                target.rename(replaced)
            unfinished.rename(target)
            if is_synced:
                sync(target.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise StorageError.of(target, error) from error

    def set_ttl(self, path: CheckpointPath, ttl_s: float | None) -> None:
        """Let a checkpoint expire this many seconds from now; None: never."""
        with self._lock:
            changed = dataclasses.replace(self.get(path), expires=None if ttl_s is None else time.time() + ttl_s)
            file = self._folder(path) / _META
            try:
                with replacing(file) as unfinished:
                    unfinished.write_bytes(_encoded(changed))
            except OSError as error:
                raise StorageError.of(file, error) from error
            self._all[path] = changed

    def delete(self, path: CheckpointPath) -> None:
        """Remove a checkpoint."""
        with self._lock:
            self.get(path)
            self._remove(path)

    def purge(self) -> None:
        """Remove what has expired."""
        with self._lock:
            for path in [path for path, checkpoint in self._all.items() if _is_expired(checkpoint)]:
                self._remove(path)

    def _remove(self, path: CheckpointPath) -> None:
        folder = self._folder(path)
        # Renamed first: a killed server must not leave half a checkpoint under its name.
        doomed = folder.with_name(UNFINISHED + folder.name)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        del self._all[path]
        shutil.rmtree(doomed, ignore_errors=True)

    # --- reading ---

    def get(self, path: CheckpointPath, tenant: str | None = None) -> Checkpoint:
        """The checkpoint at this path. Refused(404) if there is none, or for a tenant that it does not belong to."""
        found = self._all.get(path)
        if found is None or _is_expired(found) or tenant not in (None, found.tenant):
            raise Refused(404, f"There is no checkpoint {path}. `tinker checkpoint list` shows those that there are.")
        return found

    def listed(self, tenant: str, run: str | None = None) -> list[Checkpoint]:
        """The named checkpoints of a tenant, or of one of its runs, newest first."""
        return self._where(lambda c: c.tenant == tenant and run in (None, c.path.run) and not c.is_unnamed)

    def unnamed(self, run: str) -> list[Checkpoint]:
        """The sampler weights of a run that only sampling sessions know, newest first."""
        return self._where(lambda c: c.path.run == run and c.is_unnamed)

    def _where(self, is_wanted: Callable[[Checkpoint], bool]) -> list[Checkpoint]:
        with self._lock:
            found = [c for c in self._all.values() if is_wanted(c) and not _is_expired(c)]
        return sorted(found, key=lambda c: (-c.created, str(c.path)))

    def load(self, path: CheckpointPath) -> tuple[Checkpoint, dict[str, Tensor]]:
        """The checkpoint and the tensors that it was saved with."""
        with self._lock:
            checkpoint, folder = self.get(path), self._folder(path)
            try:
                tensors = {f"{_prefix(path)}{name}": t for name, t in load_file(folder / ADAPTER).items()}
                if (folder / _STATE).exists():
                    tensors |= load_file(folder / _STATE)
            except (OSError, SafetensorError) as error:
                raise StorageError(f"The checkpoint {path} cannot be read: {error}.") from error
            return checkpoint, tensors

    def size(self, path: CheckpointPath) -> int:
        """Bytes on the disk."""
        return sum(file.stat().st_size for file in self._folder(path).glob("*"))

    def files(self, path: CheckpointPath) -> dict[str, Path]:
        """The peft adapter: adapter_config.json and adapter_model.safetensors."""
        self.get(path)
        return {name: self._folder(path) / name for name in (CONFIG, ADAPTER)}

    def archive(self, path: CheckpointPath, target: Path) -> None:
        """Write the peft adapter as a .tar.gz file."""
        with tarfile.open(target, "w:gz", compresslevel=1) as tar:  # weights hardly compress
            for name, file in self.files(path).items():
                tar.add(file, arcname=name)

    def _folder(self, path: CheckpointPath) -> Path:
        return self._runs.joinpath(quote(path.run, safe=":"), *str(path).split("/")[-2:])


def _clean(folder: Path) -> None:
    """Remove what a killed server did not finish; a replaced checkpoint without a successor counts."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover)
    for replaced in folder.glob(f"{_REPLACED}*"):
        target = folder / replaced.name.removeprefix(_REPLACED)
        shutil.rmtree(replaced) if target.exists() else replaced.rename(target)


def _is_expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires is not None and checkpoint.expires <= time.time()


def _encoded(checkpoint: Checkpoint) -> bytes:
    return msgspec.json.format(msgspec.json.encode(checkpoint), indent=1)


def _prefix(path: CheckpointPath) -> str:
    return _WEIGHTS if path.kind == "training" else ""


def _peft_config(checkpoint: Checkpoint, adapter: Mapping[str, Tensor]) -> dict[str, Any]:
    """The settings by which peft loads the adapter, from the shapes of A [R, N] and B [M, R]."""
    modules = [name.partition(".lora_A.")[0] for name in adapter if ".lora_A." in name]
    shapes = {m: (adapter[f"{m}.lora_B.weight"].shape[0], adapter[f"{m}.lora_A.weight"].shape[1]) for m in modules}
    return LoraAdapter(checkpoint.spec, shapes, torch.device("meta")).peft_config(checkpoint.base_model)
