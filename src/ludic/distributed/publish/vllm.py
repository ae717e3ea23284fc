"""`create_vllm_publisher`: a publisher for vLLM servers, assembled from control plane and transport."""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import torch

from ludic.distributed.publish.in_process import Rank0OnlyPublisher
from ludic.distributed.publish.interfaces import TensorCommunicator
from ludic.distributed.publish.process_group import GroupCommunicator
from ludic.distributed.publish.push import BUCKET_BYTES, BroadcastPolicyPublisher
from ludic.distributed.publish.staged_transports import FileCommunicator, SharedMemoryCommunicator
from ludic.distributed.publish.vllm_control import ControlClient, PauseMode, VllmControlPlane
from ludic.types import ConfigError, PolicyPublisher

Transport: TypeAlias = Literal["auto", "shared_memory", "gloo", "file", "nccl"]


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
    rank0_only: bool = False,
) -> PolicyPublisher:
    """A publisher for every server of `client` (a `VLLMChatClient` with a control token).

    `transport`: "auto" is shared memory if all servers are on this machine, and gloo otherwise. `pause`: what happens to
    requests in flight. `dtype`: cast before sending. `folder`: for "file". `address`: of this machine, for "gloo" and "nccl".
    `wait_s`: how long a stopped server may take to come back before publishing fails.
    """

    def make() -> PolicyPublisher:
        control = VllmControlPlane(client, pause=pause, timeout_s=timeout_s, wait_s=wait_s)
        comm = make_communicator(control, transport, folder=folder, address=address)
        return BroadcastPolicyPublisher(control, comm, bucket_bytes=bucket_bytes, dtype=dtype)

    return Rank0OnlyPublisher(make) if rank0_only else make()


def make_communicator(
    control: VllmControlPlane, transport: Transport, *, folder: str | Path | None = None, address: str | None = None
) -> TensorCommunicator:
    if transport == "auto":
        transport = "shared_memory" if all(is_here(server) for server in control.servers) else "gloo"
    makers: dict[str, Callable[[], TensorCommunicator]] = {
        "shared_memory": lambda: SharedMemoryCommunicator(control),
        "file": lambda: FileCommunicator(control, folder),
        "gloo": lambda: GroupCommunicator(control, "gloo", address=address),
        "nccl": lambda: GroupCommunicator(control, "nccl", address=address),
    }
    if transport not in makers:
        raise ConfigError(f"transport={transport!r} is unknown. Choose from: auto, {', '.join(makers)}.")
    return makers[transport]()


def is_here(server: str) -> bool:
    """Whether a server's address is certainly this machine's."""
    host = urlsplit(server).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
