"""Servers in this process that record the calls: one behind a control plane and a communicator, and fake vLLM servers."""

import torch

from ludic.distributed import WeightPushError
from ludic.types import ConfigError
from ludic_vllm.publish.transfer import Bucket, checksum, pack, sampled, unpack


class MemoryServer:
    """Loads buckets as a server would, and says what it did."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.weights: dict[str, torch.Tensor] = {}
        self.checksums: dict[str, int] = {}
        self.version = 0
        self.log: list[str] = []
        self.failing: list[str] = []
        """Steps that fail, each once."""

    def do(self, step: str) -> None:
        self.log.append(step)
        if step in self.failing:
            self.failing.remove(step)
            raise WeightPushError(f"{step} failed")

    def take(self, bucket: Bucket, flat: torch.Tensor) -> None:
        chosen = {part.name for part in sampled(bucket)}
        for name, weight in unpack(bucket, flat):
            self.weights[name] = weight.clone()
            if name in chosen:
                self.checksums[name] = checksum(weight)


class MemoryControl:
    def __init__(self, server: MemoryServer) -> None:
        self.server = server

    def policy_version(self) -> int:
        if "policy_version" in self.server.failing:
            raise WeightPushError("no server responds")
        return self.server.version

    def has_version(self, version) -> bool:
        return self.policy_version() == version

    def require_fits(self, metadata) -> None:
        self.server.do("require_fits")
        if {part.name: part.shape for part in metadata} != self.server.shapes:
            raise ConfigError("these are other weights")

    def announce_update_batch(self, metadata, version) -> None:
        self.server.do("announce")

    def finalize_update(self, version, checksums) -> None:
        self.server.do("finalize")
        if self.server.checksums != checksums:
            raise WeightPushError("other values arrived")
        self.server.version = version

    def abandon_update(self) -> str:
        self.server.do("abandon")
        return "Restart it."


class MemoryCommunicator:
    rank = 0

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.flip_a_bit = False

    def stage(self, buckets, weights) -> None:
        self.server.do("stage")

    def broadcast(self, bucket, weights, src_rank) -> None:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        pack(bucket, weights, flat)
        if self.flip_a_bit:
            flat[0] ^= 1
        self.server.do("broadcast")
        self.server.take(bucket, flat)

    def barrier(self) -> None:
        self.server.do("barrier")

    def release(self) -> None:
        self.server.do("release")


class FakeServers:
    """Answers the control calls of vLLM with Ludic's extension, and records them."""

    def __init__(self, *servers: str) -> None:
        self.servers = list(servers or ["http://127.0.0.1:1"])
        self.log: list[tuple[str, str]] = []
        self.version = dict.fromkeys(self.servers, "default")
        self.paused = dict.fromkeys(self.servers, False)
        self.failures: list[tuple[str, str, Exception]] = []
        """(server, call, error), each raised once."""

    def calls(self, server: str | None = None) -> list[str]:
        return [call for where, call in self.log if where == (server or self.servers[0])]

    def maybe_fail(self, server: str, call: str) -> None:
        for failure in self.failures:
            if failure[:2] == (server, call):
                self.failures.remove(failure)
                raise failure[2]

    async def control_post(self, server, path, body=None, params=None, timeout_s=1.0):
        call = body["method"].removeprefix("ludic_") if path == "/collective_rpc" else path
        self.log.append((server, call))
        self.maybe_fail(server, call)
        if call in ("/pause", "/resume"):
            self.paused[server] = call == "/pause"
        return self.answer(server, call, body, params)
