"""Weights through a folder: a learner writes every version, and an actor's inference engine follows while it generates.

A file appears under its name only when it is complete. Actors take the newest version. A learner that was resumed at an earlier
step removes the versions that are newer than its own, and actors that had taken one of them go back with it.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.publisher import InPlaceServer
from ludic.types import ConfigError
from ludic.util.files import UNFINISHED, replacing

logger = logging.getLogger(__name__)

_COMPLETE = re.compile(r"weights_(\d+)\.safetensors")


@dataclass(frozen=True, order=True, slots=True)
class _PublishedFile:
    """One version in the folder, as of when it was listed."""

    version: int
    path: Path
    stamp: tuple[int, int, int]
    """Identifies the file: a version that is published again has another stamp."""


def published_files(folder: Path) -> list[_PublishedFile]:
    """The complete versions in a folder, newest first; empty if there is no folder yet."""
    found = []
    for path in folder.glob("weights_*.safetensors"):
        if match := _COMPLETE.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # deleted since the folder was listed
                facts = path.stat()
                found.append(_PublishedFile(int(match[1]), path, (facts.st_ino, facts.st_mtime_ns, facts.st_size)))
    return sorted(found, reverse=True)


class FolderPublisher:
    """For a learner: `publish` writes one version atomically. One learner per folder."""

    def __init__(self, folder: str | Path, *, keep: int = 2, dtype: torch.dtype | None = None) -> None:
        """`keep`: number of newest versions to keep. `dtype`: floating-point weights are cast to it."""
        if keep < 1:
            raise ConfigError(f"FolderPublisher(keep={keep}); keep at least 1, the newest version.")
        self.folder = Path(folder)
        self._keep, self._dtype = keep, dtype

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """Write all weights of the model by transformers' names. `version` defaults to the newest in the folder plus one."""
        if not state_dict:
            raise ConfigError("publish() got no weights; give FolderPublisher all weights of the model.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if version is None:
            version = max((file.version for file in published_files(self.folder)), default=-1) + 1
        self._write(state_dict, version)
        self._clean_up(version)

    def is_current(self, version: int) -> bool:
        """True if this version is the newest in the folder."""
        newest = next(iter(published_files(self.folder)), None)
        return newest is not None and newest.version == version

    def _write(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        from safetensors.torch import save_file

        path = self.folder / f"weights_{version}.safetensors"
        weights = {}
        for name, weight in _distinct_weights(state_dict):
            dtype = self._dtype if self._dtype and weight.is_floating_point() else weight.dtype
            weights[name] = weight.detach().to("cpu", dtype).contiguous()
        with replacing(path) as unfinished:
            save_file(weights, unfinished)

    def _clean_up(self, version: int) -> None:
        """Remove old versions, newer ones (the learner was resumed at an earlier step), and what a killed writer left."""
        files = published_files(self.folder)
        newer = [file.path for file in files if file.version > version]
        older = [file.path for file in files if file.version <= version][self._keep :]
        for path in (*newer, *older, *self.folder.glob(f"{UNFINISHED}weights_*")):
            path.unlink(missing_ok=True)


def _distinct_weights(state_dict: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tied weights once, under their first name: safetensors stores no two names for one tensor."""
    seen: set[tuple[object, ...]] = set()
    for name, weight in state_dict.items():
        place = (weight.device, weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        if weight.numel() and place in seen:
            continue
        seen.add(place)
        yield name, weight


class FolderFollower:
    """For an actor: its inference engine loads the newest version in the folder between two tokens of running requests."""

    def __init__(self, folder: str | Path, engine: InPlaceServer, model: Any = None) -> None:
        """`model`: the model whose parameters are overwritten; default: the one that the inference engine serves."""
        self.folder = Path(folder)
        self._engine = engine
        self._model = engine.model if model is None else model
        self._taken: _PublishedFile | None = None
        self._unreadable: _PublishedFile | None = None

    @property
    def version(self) -> int | None:
        """The version loaded last; None before the first."""
        return None if self._taken is None else self._taken.version

    def update(self) -> int | None:
        """Load the newest version unless the inference engine has it; returns the loaded version."""
        for number, file in enumerate(published_files(self.folder)):
            # Only the newest file may be older than what is served; if it cannot be read, the next ones must be newer than that.
            if file == self._taken or (number and self._taken is not None and file.version <= self._taken.version):
                return None
            weights = self._read(file)
            if weights is not None:
                self._take(file, weights)
                return file.version
        return None

    async def first_version(self, *, timeout_s: float | None = None, poll_s: float = 0.2) -> int:
        """Wait for the learner's first version and load it."""
        if self.version is None and not published_files(self.folder):
            logger.info("waiting for a learner to publish weights to %s", self.folder)
        try:
            async with asyncio.timeout(timeout_s):
                while self.version is None and await asyncio.to_thread(self.update) is None:
                    await asyncio.sleep(poll_s)
        except TimeoutError as error:
            raise ConfigError(
                f"No weights appeared in {self.folder} within {timeout_s:g} s. Check that the learner runs and "
                "publishes to this folder (FolderPublisher)."
            ) from error
        assert self.version is not None, "the loop above ends only with a version"
        return self.version

    async def run(self, poll_s: float = 0.2) -> None:
        """Follow until cancelled. Reading and copying run in a thread, so episodes continue."""
        while True:
            await asyncio.to_thread(self.update)
            await asyncio.sleep(poll_s)

    def _read(self, file: _PublishedFile) -> dict[str, Tensor] | None:
        """The weights of a version; None if the file is gone or incomplete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file.path, framework="pt") as stored:
                names = list(stored.keys())
                self._require_fit(file, {name: list(stored.get_slice(name).get_shape()) for name in names})
                # Copy out of the file now: the inference engine must not pause for a slow disk.
                return {name: stored.get_tensor(name).clone() for name in names}
        except FileNotFoundError:  # deleted; a newer version exists by now
            return None
        except SafetensorError as error:  # FolderPublisher renames; a tool that copies folders writes in place
            if file != self._unreadable:
                logger.warning("%s cannot be read yet (%s); keeping version %s", file.path, error, self.version)
            self._unreadable = file
            return None

    def _require_fit(self, file: _PublishedFile, shapes: Mapping[str, list[int]]) -> None:
        """Compare everything before changing anything. A tied weight may come under any of its names."""
        problem = _unfit(shapes, _named(self._model))
        if problem is not None:
            raise ConfigError(
                f"The weights in {file.path} are not those of the model that this actor serves: {problem} Nothing was "
                "changed. Load the trained model, and publish all of its weights, adapters merged "
                "(ludic.models.lora.dense_parameters)."
            )

    @torch.no_grad()
    def _take(self, file: _PublishedFile, weights: Mapping[str, Tensor]) -> None:
        own = _named(self._model)
        with self._engine.updating(file.version):
            for name, weight in weights.items():
                own[name].copy_(weight)
        self._taken = file
        logger.info("serving version %d from %s", file.version, file.path)


def _named(model: Any) -> dict[str, Tensor]:
    """Every name of every parameter; a tied one has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def _unfit(shapes: Mapping[str, list[int]], own: Mapping[str, Tensor]) -> str | None:
    """Why weights of these names and shapes cannot be copied in, as a sentence; None if they can."""
    unknown = sorted(shapes.keys() - own.keys())
    if unknown:
        return f"it has no {unknown[0]} ({len(unknown)} unknown names)."
    wrong = next((name for name in sorted(shapes) if shapes[name] != list(own[name].shape)), None)
    if wrong is not None:
        return f"{wrong} has shape {shapes[wrong]}, the model's has {list(own[wrong].shape)}."
    given = {id(own[name]) for name in shapes}
    missing = sorted(name for name, parameter in own.items() if id(parameter) not in given)
    return f"{missing[0]} is missing ({len(missing)} of {len(own)} names)." if missing else None
