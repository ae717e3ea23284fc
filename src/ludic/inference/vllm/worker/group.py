"""A process group of one trainer and the workers of one server, separate from each side's own groups.

The trainer is rank 0 and holds the store through which the workers find it. gloo moves host memory over TCP; nccl moves
GPU memory. Both sides import this file: torch and the standard library only.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address and settings of a process group."""

    backend: str
    """"gloo" or "nccl"."""
    host: str
    """The trainer's address, as the server reaches it."""
    port: int
    world_size: int
    """The trainer and every worker of the server."""
    timeout_s: float
    """For joining, and for each transfer."""


def open_store(host: str, world_size: int, timeout_s: float) -> Any:
    """The trainer's store, on a free port of this address; the workers need `store.port`."""
    listener = socket.create_server((host, 0))
    store = dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # the store closes it
    return store


def reach_store(meeting: Meeting) -> Any:
    """A worker's connection to the trainer's store."""
    timeout = timedelta(seconds=meeting.timeout_s)
    return dist.TCPStore(meeting.host, meeting.port, meeting.world_size, False, timeout=timeout, wait_for_workers=False)


def join(meeting: Meeting, store: Any, rank: int) -> Any:
    """Join the group; returns when all ranks have joined."""
    timeout = timedelta(seconds=meeting.timeout_s)
    inside = dist.PrefixStore("ludic", store)
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(inside, rank, meeting.world_size, options)
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
    options = gloo._Options()
    options._timeout = timeout
    # Without this gloo listens on the address of the host's own name, which may not resolve in a container.
    options._devices = [gloo.create_device(hostname=address_towards(meeting.host))]
    return gloo(inside, rank, meeting.world_size, options)


def broadcast(group: Any, flat: Tensor) -> None:
    """Send from the trainer to all workers; returns when complete."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def address_towards(host: str) -> str:
    """The address of this machine that `host` would see. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address
