"""Transports that stage the weights before the pause, for the servers to load.

Shared memory for servers on the same machine, a folder of safetensors files for servers that see the folder. Writing overlaps
with generation; the pause lasts only as long as the loading.
"""

import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ludic.distributed.publish.vllm_control import VllmControlPlane
from ludic.inference.vllm.buckets import ALIGNMENT, Bucket, pack
from ludic.types import ConfigError


class SharedMemoryCommunicator:
    """One memory block of this process that holds the whole model; the servers map it.

    It has no name in /dev/shm: nothing is left behind however this process ends, and a container's small /dev/shm is no
    limit. It is kept between pushes, since filling memory that was touched before is several times as fast.
    """

    rank = 0

    def __init__(self, control: VllmControlPlane) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                f"transport='shared_memory' needs Linux, but this is {sys.platform}. Use 'file' or 'gloo'."
            )
        self._control = control
        self._path = ""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._begins: dict[Bucket, int] = {}

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        size = 0
        for bucket in buckets:
            self._begins[bucket] = size
            size += -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        if self._block.numel() < size:
            self._reserve(size)
        for bucket, begin in self._begins.items():
            pack(bucket, weights, self._block[begin : begin + bucket.num_bytes])
        self._control.require_readable(
            [self._path], "Is it in another container, or another user's? Use transport='gloo' or 'file'."
        )

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        where = {"path": self._path, "offset": self._begins[bucket], "size": self._block.numel()}
        self._control.load(bucket, {"kind": "shared_memory", **where}).result()

    def barrier(self) -> None:
        """Nothing to wait for: each bucket is loaded when `broadcast` returns."""

    def release(self) -> None:
        self._begins = {}

    def _reserve(self, size: int) -> None:
        """Allocate the block up front: a lack of memory during a write would end the process by a signal."""
        handle = os.memfd_create("ludic-weights")
        weakref.finalize(self, os.close, handle)
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            raise ConfigError(
                f"There is no memory for {size / 1e9:.2f} GB of weights in addition to the trainer's ({error.strerror}). Use "
                "transport='file' or 'gloo', or dtype=torch.bfloat16 to send half."
            ) from error
        self._path = f"/proc/{os.getpid()}/fd/{handle}"
        self._block = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)


class FileCommunicator:
    """One safetensors file per bucket, in a folder that every server sees under the same path."""

    rank = 0

    def __init__(self, control: VllmControlPlane, folder: str | Path | None = None) -> None:
        """`folder`: where each push creates a subfolder; default: the system's temporary folder."""
        self._control = control
        self._folder = Path(folder).absolute() if folder is not None else Path(tempfile.gettempdir())
        if not self._folder.is_dir():
            raise ConfigError(f"folder={str(folder)!r} is not a folder. Create it on a disk that every server sees.")
        self._files: dict[Bucket, Path] = {}
        self._staging: Path | None = None

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        self._staging = Path(tempfile.mkdtemp(prefix="ludic-weights-", dir=self._folder))
        for number, bucket in enumerate(buckets):
            self._files[bucket] = self._staging / f"bucket_{number:04}.safetensors"
            save_file({p.name: as_sent(weights[p.name], p.torch_dtype) for p in bucket.weights}, self._files[bucket])
        self._control.require_readable(
            [str(path) for path in self._files.values()],
            f"Give a folder= that it sees under the same path as this machine (now {self._folder}), or use transport='gloo'.",
        )

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        self._control.load(bucket, {"kind": "file", "path": str(self._files[bucket])}).result()

    def barrier(self) -> None:
        """Nothing to wait for: each bucket is loaded when `broadcast` returns."""

    def release(self) -> None:
        if self._staging is not None:
            shutil.rmtree(self._staging)
        self._staging, self._files = None, {}


def as_sent(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(device="cpu", dtype=dtype).contiguous()
