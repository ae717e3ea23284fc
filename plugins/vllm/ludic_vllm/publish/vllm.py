"""`create_vllm_publisher` for vLLM servers, and the transports that it chooses among.

Shared memory, CUDA IPC and files stage the weights before the pause, so that it lasts only as long as the loading. Process groups
send while the servers are paused: gloo over TCP between machines, nccl between GPUs. nccl was seen to connect no further than its
refusal of two processes on one GPU ("Duplicate GPU detected"): no machine with two GPUs was available.
"""

import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ludic.distributed.publisher import Rank0OnlyPublisher, WeightPushError
from ludic.types import ConfigError, PolicyPublisher
from ludic.util.urls import is_loopback
from ludic_vllm.publish.broadcast import BUCKET_BYTES, BroadcastPolicyPublisher, TensorCommunicator
from ludic_vllm.publish.control import ControlClient, PauseMode, VllmControlPlane
from ludic_vllm.publish.transfer import (
    ALIGNMENT,
    Bucket,
    Meeting,
    address_towards,
    broadcast,
    join,
    open_store,
    pack,
    share_cuda_block,
)

Transport: TypeAlias = Literal["auto", "shared_memory", "cuda_ipc", "gloo", "file", "nccl"]


def create_vllm_publisher(
    client: ControlClient,
    *,
    transport: Transport = "auto",
    pause: PauseMode = "keep",
    dtype: torch.dtype | None = None,
    folder: str | Path | None = None,
    address: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 600.0,
    wait_s: float = 120.0,
    attempts: int = 2,
    rank0_only: bool = False,
) -> PolicyPublisher:
    """A publisher for every server of `client` (a `VLLMChatClient` with a control token).

    `transport`: "auto" is shared memory if all servers are on this machine, and gloo otherwise; "cuda_ipc" is for a server on the
    trainer's GPU. `pause`: what happens to
    requests in flight. `dtype`: cast before sending. `folder`: for "file". `address`: of this machine, for "gloo" and "nccl".
    `wait_s`: how long a stopped server may take to come back before publishing fails. `attempts`: how often a push is tried.
    """

    def make() -> PolicyPublisher:
        control = VllmControlPlane(client, pause=pause, timeout_s=timeout_s, wait_s=wait_s)
        comm = make_communicator(control, transport, folder=folder, address=address)
        return BroadcastPolicyPublisher(control, comm, bucket_bytes=bucket_bytes, dtype=dtype, attempts=attempts)

    return Rank0OnlyPublisher(make) if rank0_only else make()


def make_communicator(
    control: VllmControlPlane, transport: Transport, *, folder: str | Path | None = None, address: str | None = None
) -> TensorCommunicator:
    if transport == "auto":
        transport = "shared_memory" if all(is_here(server) for server in control.servers) else "gloo"
    makers: dict[str, Callable[[], TensorCommunicator]] = {
        "shared_memory": lambda: SharedMemoryCommunicator(control),
        "cuda_ipc": lambda: CudaIpcCommunicator(control),
        "file": lambda: FileCommunicator(control, folder),
        "gloo": lambda: GroupCommunicator(control, "gloo", address=address),
        "nccl": lambda: GroupCommunicator(control, "nccl", address=address),
    }
    if transport not in makers:
        raise ConfigError(f"transport={transport!r} is unknown. Choose from: auto, {', '.join(makers)}.")
    return makers[transport]()


def is_here(server: str) -> bool:
    """Return True if a server's address is certainly this machine's."""
    return is_loopback(urlsplit(server).hostname or "")


class _BlockCommunicator:
    """One block of memory that holds the whole model; the servers map it.

    It is kept between pushes, since filling memory that was touched before is several times as fast, and for a server that is
    restarted.
    """

    rank = 0
    keeps_weights = True

    def __init__(self, control: VllmControlPlane) -> None:
        self._control = control
        self._block = torch.empty(0, dtype=torch.uint8)
        self._begins: dict[Bucket, int] = {}

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        size, self._begins = 0, {}
        for bucket in buckets:
            self._begins[bucket] = size
            size += -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        if self._block.numel() < size:
            self._block = self._reserve(size)
        for bucket, begin in self._begins.items():
            pack(bucket, weights, self._block[begin : begin + bucket.num_bytes])
        self._require_mappable()

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        self._control.load(bucket, self._source(self._begins[bucket])).result()

    def barrier(self) -> None:
        """Nothing to wait for: each bucket is loaded when `broadcast` returns."""

    def release(self) -> None:
        """Nothing to free: the block stays."""

    def _reserve(self, size: int) -> Tensor:
        """A block of `size` bytes."""
        raise NotImplementedError

    def _require_mappable(self) -> None:
        """Before the pause: raise if a server cannot map the block."""
        raise NotImplementedError

    def _source(self, begin: int) -> dict[str, Any]:
        """The place of a bucket that begins there, for the servers (`TransferUpdate.source`)."""
        raise NotImplementedError


class SharedMemoryCommunicator(_BlockCommunicator):
    """Memory of this process. It has no name in /dev/shm: nothing is left behind however this process ends, and a container's
    small /dev/shm does not limit it."""

    def __init__(self, control: VllmControlPlane) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                f"transport='shared_memory' needs Linux, but this is {sys.platform}. Use 'file' or 'gloo'."
            )
        super().__init__(control)
        self._path = ""

    def _reserve(self, size: int) -> Tensor:
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
        return torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    def _require_mappable(self) -> None:
        self._control.require_readable(
            [self._path], "Is it in another container, or another user's? Use transport='gloo' or 'file'."
        )

    def _source(self, begin: int) -> dict[str, Any]:
        return {"kind": "shared_memory", "path": self._path, "offset": begin, "size": self._block.numel()}


class CudaIpcCommunicator(_BlockCommunicator):
    """Memory of the GPU that trainer and server share: the weights never leave it, at the price of a second copy there."""

    def __init__(self, control: VllmControlPlane, device: torch.device | str | None = None) -> None:
        """`device`: the trainer's GPU; default: the current one."""
        if not torch.cuda.is_available():
            raise ConfigError("transport='cuda_ipc' needs a GPU, and this process sees none. Use 'shared_memory'.")
        super().__init__(control)
        self._device = torch.device(device or f"cuda:{torch.cuda.current_device()}")
        self._shared: dict[str, Any] = {}

    def _reserve(self, size: int) -> Tensor:
        self._block = torch.empty(0, dtype=torch.uint8)  # the old one is freed first
        try:
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"The GPU has no room for {size / 1e9:.2f} GB of weights beside the trainer's. Use transport='shared_memory', or a "
                "smaller --server-memory."
            ) from error
        self._shared = share_cuda_block(block)
        return block

    def _require_mappable(self) -> None:
        torch.cuda.synchronize(self._device)  # another process does not wait for this one's stream
        self._control.require_mappable(
            self._shared,
            "CUDA IPC needs one GPU for trainer and server, on one machine. Use transport='shared_memory'.",
        )

    def _source(self, begin: int) -> dict[str, Any]:
        return {"kind": "cuda_ipc", "block": self._shared, "offset": begin}


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
            sent = {p.name: weights[p.name].detach().to("cpu", p.torch_dtype).contiguous() for p in bucket.weights}
            save_file(sent, self._files[bucket])
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


class GroupCommunicator:
    """Rank 0 of a process group with each server's workers.

    Every push creates one new group per server: a restarted server or a broken group needs no special case, and a slow server
    does not delay another. gloo takes milliseconds to set up.
    """

    rank = 0

    def __init__(
        self,
        control: VllmControlPlane,
        backend: Literal["gloo", "nccl"] = "gloo",
        *,
        address: str | None = None,
        timeout_s: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        """`address`: this machine's address as the servers reach it; default: that of the interface towards them.

        `device`: where buckets are filled; nccl needs the trainer's GPU.
        """
        self._control, self._backend, self._address, self._timeout_s = control, backend, address, timeout_s
        self._device = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
        self._groups: dict[str, Any] = {}
        self._stores: list[Any] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._threads = ThreadPoolExecutor(thread_name_prefix="ludic-weight-group")

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        for server in self._control.servers:
            self._groups[server] = self._connect(server)

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        if self._buffer.numel() < bucket.num_bytes:
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        flat = self._buffer[: bucket.num_bytes]
        pack(bucket, weights, flat)
        taking = self._control.load(bucket, {"kind": "group"})
        sending = {s: self._threads.submit(broadcast, group, flat) for s, group in self._groups.items()}
        finish(taking, sending)

    def barrier(self) -> None:
        """Nothing to wait for: each bucket is loaded when `broadcast` returns."""

    def release(self) -> None:
        """A send that hangs because its server does not receive ends by its own timeout; until then it holds the buffer."""
        self._groups, self._stores, self._buffer = {}, [], torch.empty(0, dtype=torch.uint8)

    def _connect(self, server: str) -> Any:
        host = self._address or address_towards(str(urlsplit(server).hostname))
        world_size = 1 + self._control.num_workers(server)
        store = open_store(host, world_size, self._timeout_s)
        self._stores.append(store)
        meeting = Meeting(self._backend, host, store.port, world_size, self._timeout_s)
        coming = self._control.connect(server, asdict(meeting))
        joining = self._threads.submit(join, meeting, store, 0)
        finish(coming, {server: joining})
        return joining.result()


def finish(theirs: "Future[Any]", ours: Mapping[str, "Future[Any]"]) -> None:
    """Wait for both sides of a transfer; raises the first failure at once, without waiting for the side that now hangs."""
    wait([theirs, *ours.values()], return_when=FIRST_EXCEPTION)
    if theirs.done():
        theirs.result()
    for server, half in ours.items():
        if not half.done():
            continue
        error = half.exception()
        if error is not None:
            advice = (
                " For a server on the trainer's GPU use transport='cuda_ipc'." if "Duplicate GPU" in str(error) else ""
            )
            raise WeightPushError(f"{server}: the connection for the weights failed: {error}{advice}") from error
