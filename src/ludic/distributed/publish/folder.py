"""Weights through a folder: a learner leaves every version in it, and an actor's own engine follows while it generates.

A file appears under its name only when it is complete. Actors take the newest version. A learner that was resumed at an earlier
step removes the versions that are newer than its own, and actors that had taken one of them go back with it.
"""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.publish.in_process import InPlaceServer
from ludic.distributed.publish.staged_transports import as_sent
from ludic.types import ConfigError
from ludic.types.files import UNFINISHED, replacing

logger = logging.getLogger(__name__)

_COMPLETE = re.compile(r"weights_(\d+)\.safetensors")


@dataclass(frozen=True, order=True, slots=True)
class PublishedFile:
    """One version in the folder, as it was when it was seen."""

    version: int
    path: Path
    stamp: tuple[int, int, int]
    """Which file it was: a version that was published once more is another."""


def published_files(folder: Path) -> list[PublishedFile]:
    """The complete versions in a folder, newest first; none where there is no folder yet."""
    return sorted(_complete_files(folder), reverse=True)


def _complete_files(folder: Path) -> Iterator[PublishedFile]:
    for path in folder.glob("weights_*.safetensors"):
        match = _COMPLETE.fullmatch(path.name)
        if match is None:
            continue
        try:
            facts = path.stat()
        except FileNotFoundError:  # cleaned up since the folder was read
            continue
        yield PublishedFile(int(match[1]), path, (facts.st_ino, facts.st_mtime_ns, facts.st_size))


class FolderPublisher:
    """For a learner: `publish` writes one version, complete or not at all. One learner per folder."""

    def __init__(self, folder: str | Path, *, keep: int = 2, dtype: torch.dtype | None = None) -> None:
        """`keep`: how many of the newest versions stay. `dtype`: floating-point weights are cast to it on the way."""
        if keep < 1:
            raise ConfigError(f"FolderPublisher(keep={keep}); the newest version has to stay, so keep at least 1.")
        self.folder = Path(folder)
        self._keep, self._dtype = keep, dtype

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """All weights of the model by transformers' names. Without a version, the one after the newest in the folder."""
        if not state_dict:
            raise ConfigError("There are no weights to publish; give FolderPublisher all weights of the model.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if version is None:
            version = max((file.version for file in published_files(self.folder)), default=-1) + 1
        self._write(state_dict, version)
        self._clean_up(version)

    def is_current(self, version: int) -> bool:
        """Whether this version is the one that followers find."""
        newest = next(iter(published_files(self.folder)), None)
        return newest is not None and newest.version == version

    def _write(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        from safetensors.torch import save_file

        path = self.folder / f"weights_{version}.safetensors"
        weights = {name: as_sent(weight, self._sent_dtype(weight)) for name, weight in _distinct(state_dict)}
        with replacing(path) as unfinished:
            save_file(weights, unfinished)

    def _sent_dtype(self, weight: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and weight.is_floating_point() else weight.dtype

    def _clean_up(self, version: int) -> None:
        """Remove old versions, newer ones (the learner was resumed at an earlier step), and what a killed writer left."""
        files = published_files(self.folder)
        newer = [file.path for file in files if file.version > version]
        older = [file.path for file in files if file.version <= version][self._keep :]
        for path in (*newer, *older, *self.folder.glob(f"{UNFINISHED}weights_*")):
            path.unlink(missing_ok=True)


def _distinct(state_dict: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tied weights once, under their first name: a file holds no two names for one tensor."""
    seen: set[tuple[object, ...]] = set()
    for name, weight in state_dict.items():
        place = (weight.device, weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        if weight.numel() and place in seen:
            continue
        seen.add(place)
        yield name, weight


class FolderFollower:
    """For an actor: its own engine takes the newest version in the folder, between two tokens."""

    def __init__(self, folder: str | Path, engine: InPlaceServer, model: Any = None) -> None:
        """`model`: whose parameters are written to; by default the one that the engine serves."""
        self.folder = Path(folder)
        self._engine = engine
        self._model = engine.model if model is None else model
        self._taken: PublishedFile | None = None
        self._unreadable: PublishedFile | None = None

    @property
    def version(self) -> int | None:
        """The version that was taken last; None before the first."""
        return None if self._taken is None else self._taken.version

    def update(self) -> int | None:
        """Take the newest version unless the engine has it already; the version that was taken comes back."""
        for number, file in enumerate(published_files(self.folder)):
            # Only the newest may lie behind what is served; where that one cannot be read, the others must bring something new.
            if file == self._taken or (number and self._taken is not None and file.version <= self._taken.version):
                return None
            weights = self._read(file)
            if weights is not None:
                self._take(file, weights)
                return file.version
        return None

    async def first_version(self, *, timeout_s: float | None = None, poll_s: float = 0.2) -> int:
        """Wait for the learner's first version, and take it."""
        if self.version is None and not published_files(self.folder):
            logger.info("waiting for a learner to publish weights to %s", self.folder)
        try:
            async with asyncio.timeout(timeout_s):
                while self.version is None and await asyncio.to_thread(self.update) is None:
                    await asyncio.sleep(poll_s)
        except TimeoutError as error:
            raise ConfigError(
                f"No weights appeared in {self.folder} within {timeout_s:g} s. Is the learner running, and does it publish to this "
                "folder (FolderPublisher)?"
            ) from error
        assert self.version is not None, "that is what was waited for"
        return self.version

    async def run(self, poll_s: float = 0.2) -> None:
        """Follow until cancelled. Reading and copying are done in a thread: episodes go on."""
        while True:
            await asyncio.to_thread(self.update)
            await asyncio.sleep(poll_s)

    def _read(self, file: PublishedFile) -> dict[str, Tensor] | None:
        """The weights of a version; None when it has gone, or is not complete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file.path, framework="pt") as stored:
                names = list(stored.keys())
                self._require_fit(file, {name: list(stored.get_slice(name).get_shape()) for name in names})
                # Copied out of the file now: the engine must not stand still for a slow disk.
                return {name: stored.get_tensor(name).clone() for name in names}
        except FileNotFoundError:  # cleaned up; a newer one is there by now
            return None
        except SafetensorError as error:  # not by our publisher: something that copies folders writes in place
            if file != self._unreadable:
                logger.warning("%s cannot be read yet (%s); staying at version %s", file.path, error, self.version)
            self._unreadable = file
            return None

    def _require_fit(self, file: PublishedFile, shapes: Mapping[str, list[int]]) -> None:
        """All is compared before anything is changed. A weight that is tied may come under any of its names."""
        own = _named(self._model)
        problem = _unfit(shapes, own)
        if problem is not None:
            raise ConfigError(
                f"The weights in {file.path} are not those of the model that this actor serves: {problem} Nothing was "
                "changed. Load the model that is trained, and publish all of its weights, adapters merged "
                "(ludic.models.lora.dense_parameters)."
            )

    @torch.no_grad()
    def _take(self, file: PublishedFile, weights: Mapping[str, Tensor]) -> None:
        own = _named(self._model)
        with self._engine.updating(file.version):
            for name, weight in weights.items():
                own[name].copy_(weight)
        self._taken = file
        logger.info("version %d is served, from %s", file.version, file.path)


def _named(model: Any) -> dict[str, Tensor]:
    """Every name of every parameter: one that is tied has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def _unfit(shapes: Mapping[str, list[int]], own: Mapping[str, Tensor]) -> str | None:
    """Why weights of these names and shapes cannot be copied in, as a sentence; None when they can."""
    unknown = sorted(shapes.keys() - own.keys())
    if unknown:
        return f"it has no {unknown[0]} ({len(unknown)} unknown names)."
    wrong = next((name for name in sorted(shapes) if shapes[name] != list(own[name].shape)), None)
    if wrong is not None:
        return f"{wrong} has shape {shapes[wrong]}, the model's has {list(own[wrong].shape)}."
    given = {id(own[name]) for name in shapes}
    missing = sorted(name for name, parameter in own.items() if id(parameter) not in given)
    return f"{missing[0]} is missing ({len(missing)} of {len(own)} names)." if missing else None
