"""Transports that send while the servers are paused: gloo over TCP between machines, nccl between GPUs.

Every push creates one new process group per server: a restarted server or a broken group needs no special case, and
a slow server does not delay sending to another. gloo takes milliseconds to set up. The nccl half has not been run: no
machine with two GPUs was available.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ludic.distributed.publish.interfaces import WeightPushError
from ludic.distributed.publish.vllm_control import VllmControlPlane
from ludic.inference.vllm.buckets import Bucket, pack
from ludic.inference.vllm.worker.group import Meeting, address_towards, broadcast, join, open_store


class GroupCommunicator:
    """Rank 0 of a process group with each server's workers."""

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
            raise WeightPushError(f"{server}: the connection for the weights failed: {error}") from error
