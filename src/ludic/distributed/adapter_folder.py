"""Adapters in a folder that the servers see: one subfolder per version, the newest also under the adapter's own name.

A server that has to throw an adapter out (it holds few, and all its weights may have been replaced) reads it again when it is
next asked for, from the path under which it was registered. That path is a link, always to the newest.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ludic.distributed.adapter_control import AdapterControlPlane
from ludic.distributed.peft_adapter import CONFIG, WEIGHTS
from ludic.inference.vllm_buckets import Bucket
from ludic.types import ConfigError

NUM_KEPT = 2
"""The one that is served, and the one before it, which is served until every server has the new one."""


class AdapterFolder:
    """The communicator of an adapter push: what is staged is a folder, and what is sent is its path."""

    rank = 0

    def __init__(
        self, control: AdapterControlPlane, name: str, write: Callable[[Path], None], folder: str | Path | None = None
    ) -> None:
        """`folder`: by default a temporary one, which goes with the trainer."""
        self._control, self._name, self._write = control, name, write
        if folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ludic-adapters-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        else:
            self._folder = Path(folder).absolute()
        if not self._folder.is_dir():
            raise ConfigError(f"folder={str(folder)!r} is not a folder. Make it, on a disk that every server sees.")
        self._versions: list[Path] = []

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        path = Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir=self._folder))
        self._versions.append(path)
        self._write(path)
        self._control.require_readable(
            [str(path / file) for file in (WEIGHTS, CONFIG)],
            f"Give a folder= that it sees under the same path as this machine does (now {self._folder}).",
        )
        self._control.try_adapter(path)

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        """All buckets are in the one folder, which is loaded at once."""

    def barrier(self) -> None:
        link = self._folder / self._name
        new = self._folder / f".{self._name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(self._versions[-1].name, target_is_directory=True)
        new.replace(link)  # at every moment the link leads somewhere
        self._control.load_adapter(link, self._versions[-1])

    def release(self) -> None:
        """After a failure too; what is served is what the link leads to."""
        served = (self._folder / self._name).resolve()
        for path in self._versions[:-NUM_KEPT]:
            if path != served:
                shutil.rmtree(path)
        self._versions = [path for path in self._versions if path.exists()]
