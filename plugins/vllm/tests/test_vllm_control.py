"""The calls of a weight push to vLLM: their order on several servers, and the state after a failure."""

import json
import os

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher, Rank0OnlyPublisher, WeightPushError, create_vllm_publisher
from ludic.models.lora import dense_parameters
from ludic.types import ConfigError
from ludic_vllm.publish.control import VllmControlPlane
from ludic_vllm.publish.transfer import Bucket, checksum, open_cuda_block, sampled, share_cuda_block, unpack
from ludic_vllm.publish.vllm import (
    CudaIpcCommunicator,
    FileCommunicator,
    SharedMemoryCommunicator,
    is_here,
    make_communicator,
)
from plugins.vllm.tests.in_memory import FakeServers
from tests.unit.training.bandit import tiny_llama

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.arange(4.0)}
ORDER = [
    "/pause",
    "forget_update",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
]


class WeightServers(FakeServers):
    """Servers that load the pushed weights."""

    def __init__(self, *servers: str) -> None:
        super().__init__(*servers)
        self.received: dict[str, dict[str, torch.Tensor]] = {server: {} for server in self.servers}
        self.checksums: dict[str, dict[str, int]] = {server: {} for server in self.servers}
        self.unreadable: list[str] = []
        self.unmappable: list[str] = []
        self.gpu: torch.Tensor | None = None
        """The trainer's block, which these servers share with it."""
        self.shapes = {name: list(weight.shape) for name, weight in WEIGHTS.items()}
        self.keeps_cache = self.flips_a_bit = False
        self.differing: list[str] = []
        self.pause_mode = ""
        self.asleep: set[str] = set()

    async def control_get(self, server, path, params=None, timeout_s=1.0):
        self.maybe_fail(server, path)
        answers = {"/weight_info": {"weight_version": self.version[server]}, "/get_world_size": {"world_size": 1}}
        return {**answers, "/is_sleeping": {"is_sleeping": server in self.asleep}}[path]

    def answer(self, server, call, body, params):
        if call == "parameters":
            return {"results": [self.shapes]}
        if call == "unreadable":
            return {"results": [self.unreadable]}
        if call == "unmappable":
            return {"results": [self.unmappable]}
        if call == "received":
            return {"results": [{"checksums": self.checksums[server], "differing": self.differing}]}
        if call == "/reset_prefix_cache":
            return {"success": not self.keeps_cache}
        if call == "/sleep":
            assert params == {"level": "1", "mode": "wait"}, "the weights have to survive, and requests to end"
            self.asleep.add(server)
        if call == "/wake_up":
            self.asleep.remove(server)
        if call == "/pause":
            assert server not in self.asleep, "nothing can be loaded into memory that is not there"
            self.pause_mode = params["mode"]
        if call == "/update_weights":
            self._take(server, body["update_info"])
        if call == "/finish_weight_update":
            self.version[server] = body["weight_version"]
        return {"results": [None]}

    def _take(self, server: str, info: dict) -> None:
        bucket, source = Bucket.from_json(info["bucket"]), info["source"]
        if source["kind"] == "file":
            from safetensors.torch import load_file

            weights = list(load_file(source["path"]).items())
        elif source["kind"] == "cuda_ipc":
            assert self.gpu is not None and source["block"] == {"gpu": "one"}
            weights = unpack(bucket, self.gpu[source["offset"] : source["offset"] + bucket.num_bytes])
        else:
            whole = torch.from_file(source["path"], size=source["size"], dtype=torch.uint8)
            weights = unpack(bucket, whole[source["offset"] : source["offset"] + bucket.num_bytes])
        chosen = {part.name for part in sampled(bucket)}
        for name, weight in weights:
            self.received[server][name] = weight = weight.clone()
            if self.flips_a_bit:
                weight.view(torch.uint8).view(-1)[0] ^= 1
            if name in chosen:
                self.checksums[server][name] = checksum(weight)


def make(servers: WeightServers, **settings) -> BroadcastPolicyPublisher:
    publisher = create_vllm_publisher(servers, **{"wait_s": 0.0, **settings})
    assert isinstance(publisher, BroadcastPolicyPublisher)
    return publisher


@pytest.mark.parametrize("transport", ["file", "shared_memory"])
def test_weights_are_staged_before_the_pause_and_removed_afterwards(transport, tmp_path):
    servers = WeightServers()
    make(servers, transport=transport, folder=tmp_path, pause="wait").publish(WEIGHTS, version=5)
    assert servers.calls() == ["parameters", "unreadable", *ORDER, "received", "/resume"]
    assert servers.pause_mode == "wait"
    assert servers.version[servers.servers[0]] == "5"
    assert all(torch.equal(servers.received[servers.servers[0]][name], w) for name, w in WEIGHTS.items())
    assert not list(tmp_path.iterdir())


def test_all_servers_complete_a_step_before_the_next_begins():
    servers = WeightServers("http://127.0.0.1:1", "http://127.0.0.1:2")
    make(servers).publish(WEIGHTS, version=2)
    kinds = [call for _, call in servers.log]
    assert kinds[::2] == kinds[1::2], "each step on both before the next on either"
    assert servers.log[-2:] == [(server, "/resume") for server in servers.servers]
    assert set(servers.version.values()) == {"2"}


def test_a_push_wakes_the_servers_that_sleep():
    servers = WeightServers("http://127.0.0.1:1", "http://127.0.0.1:2")
    control = VllmControlPlane(servers)
    control.sleep()
    servers.asleep.remove("http://127.0.0.1:2")  # it was restarted meanwhile
    make(servers).publish(WEIGHTS, version=2)
    assert not servers.asleep and set(servers.version.values()) == {"2"}
    assert [server for server, call in servers.log if call == "/wake_up"] == ["http://127.0.0.1:1"]
    control.wake()
    assert [call for _, call in servers.log].count("/wake_up") == 1, "all are awake"


def test_a_server_that_cannot_wake_is_asked_once():
    """vLLM takes all of its memory at each attempt and keeps what a failed one took."""
    servers = WeightServers()
    VllmControlPlane(servers).sleep()
    servers.failures = [(servers.servers[0], "/wake_up", RuntimeError("CUDA Error: out of memory"))] * 5
    with pytest.raises(ConfigError, match="cannot wake. .*out of memory.*--server-memory"):
        make(servers, wait_s=60.0, attempts=3).publish(WEIGHTS, version=2)
    assert servers.calls().count("/wake_up") == 1 and "/pause" not in servers.calls()


def test_a_server_that_stops_while_it_wakes_is_waited_for():
    servers = WeightServers()
    VllmControlPlane(servers).sleep()
    servers.failures = [(servers.servers[0], "/wake_up", ConnectionError("refused"))]
    make(servers, wait_s=60.0).publish(WEIGHTS, version=2)
    assert servers.version[servers.servers[0]] == "2"


def test_one_server_that_cannot_wake_is_asked_once_while_another_is_waited_for():
    servers = WeightServers("http://a:1", "http://b:1")
    VllmControlPlane(servers).sleep()
    servers.failures = [("http://a:1", "/wake_up", ConnectionError("refused"))] * 3
    servers.failures += [("http://b:1", "/wake_up", RuntimeError("CUDA Error: out of memory"))] * 5
    with pytest.raises(ConfigError, match="cannot wake"):
        make(servers, wait_s=60.0, attempts=3).publish(WEIGHTS, version=2)
    assert [call for call in servers.log if call == ("http://b:1", "/wake_up")] == [("http://b:1", "/wake_up")]


def test_policy_version_is_the_lowest_of_all_servers():
    servers = WeightServers("http://a:1", "http://b:1")
    control = VllmControlPlane(servers)
    servers.version = {"http://a:1": "7", "http://b:1": "5"}
    assert control.policy_version() == 5
    servers.version["http://b:1"] = "default"
    assert control.policy_version() == 0


def test_a_fresh_server_does_not_have_version_0():
    """Its folder may hold other weights than those that were published as version 0."""
    servers = WeightServers("http://a:1", "http://b:1")
    control = VllmControlPlane(servers)
    assert not control.has_version(0)
    servers.version = {"http://a:1": "0", "http://b:1": "0"}
    assert control.has_version(0) and not control.has_version(1)
    servers.version["http://b:1"] = "1"
    assert not control.has_version(0) and not control.has_version(1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({**WEIGHTS, "b.weight": torch.zeros(5)}, r"b.weight has shape \[5\], the server's has \[4\]"),
        ({"a.weight": WEIGHTS["a.weight"]}, "b.weight is missing"),
        ({**WEIGHTS, "c": torch.zeros(1)}, "it has no c"),
    ],
)
def test_weights_of_another_model_are_refused_before_any_change(weights, message):
    servers = WeightServers()
    with pytest.raises(ConfigError, match=message):
        make(servers).publish(weights, version=1)
    assert servers.calls() == ["parameters"]


def test_a_folder_that_a_server_cannot_read_is_refused_before_the_pause(tmp_path):
    servers = WeightServers()
    servers.unreadable = ["/elsewhere/bucket"]
    with pytest.raises(ConfigError, match="cannot read /elsewhere/bucket. Give a folder="):
        make(servers, transport="file", folder=tmp_path).publish(WEIGHTS, version=1)
    assert "/pause" not in servers.calls()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["/pause", *ORDER[2:], "received", "/resume"])
def test_a_failed_call_is_retried_with_a_complete_second_push(call):
    servers = WeightServers()
    servers.failures = [(servers.servers[0], call, RuntimeError("500: loader"))]
    make(servers).publish(WEIGHTS, version=4)
    assert servers.version[servers.servers[0]] == "4"
    assert servers.calls()[-8:] == [*ORDER, "received", "/resume"]
    assert not servers.paused[servers.servers[0]]


def test_half_loaded_servers_stay_paused():
    servers = WeightServers("http://127.0.0.1:1", "http://127.0.0.1:2")
    broken = ("http://127.0.0.1:2", "/update_weights", RuntimeError("500: no such layer"))
    servers.failures = [broken, (*broken[:2], RuntimeError("500: no such layer"))]
    with pytest.raises(
        WeightPushError, match=r"127.0.0.1:2: RuntimeError: 500: no such layer .*stay paused.* Publish again"
    ):
        make(servers).publish(WEIGHTS, version=4)
    assert set(servers.paused.values()) == {True}
    assert set(servers.version.values()) == {"default"}


def test_servers_resume_with_their_weights_if_nothing_was_loaded():
    servers = WeightServers("http://127.0.0.1:1", "http://127.0.0.1:2")
    servers.failures = [("http://127.0.0.1:2", "/pause", TimeoutError("slow")) for _ in range(2)]
    with pytest.raises(WeightPushError, match="continue with their previous weights"):
        make(servers).publish(WEIGHTS, version=4)
    assert set(servers.paused.values()) == {False}
    assert "/start_weight_update" not in servers.calls()


def test_a_kept_prefix_cache_and_unloaded_weights_are_errors():
    servers = WeightServers()
    servers.keeps_cache = True
    with pytest.raises(WeightPushError, match="kept its prefix cache"):
        make(servers).publish(WEIGHTS, version=4)
    servers.keeps_cache, servers.differing = False, ["norm.weight"]
    with pytest.raises(WeightPushError, match=r"did not load what it received, for example norm\.weight"):
        make(servers).publish(WEIGHTS, version=4)
    assert servers.paused[servers.servers[0]]


def test_publish_waits_for_a_restarting_server():
    servers = WeightServers()
    servers.failures = [(servers.servers[0], "/weight_info", ConnectionRefusedError("starting")) for _ in range(2)]
    make(servers, wait_s=30.0).publish(WEIGHTS, version=4)
    assert servers.version[servers.servers[0]] == "4"


def test_publish_waits_for_a_server_that_stops_before_the_pause():
    servers = WeightServers()
    servers.failures = [(servers.servers[0], "parameters", ConnectionResetError("killed"))]
    make(servers, wait_s=30.0).publish(WEIGHTS, version=4)
    assert servers.version[servers.servers[0]] == "4" and servers.failures == []


def test_auto_transport_is_shared_memory_only_on_this_machine():
    here = VllmControlPlane(WeightServers())
    there = VllmControlPlane(WeightServers("http://127.0.0.1:1", "http://10.0.0.1:1"))
    assert isinstance(make_communicator(here, "auto"), SharedMemoryCommunicator)
    assert type(make_communicator(there, "auto")).__name__ == "GroupCommunicator"
    assert is_here("http://localhost:8000") and is_here("http://[::1]:8000") and not is_here("http://node7:8000")


def test_wrong_settings_are_refused():
    servers = WeightServers()
    with pytest.raises(ConfigError, match="Choose from: auto, shared_memory"):
        create_vllm_publisher(servers, transport="pigeon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pause='stop'"):
        create_vllm_publisher(servers, pause="stop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a folder"):
        FileCommunicator(VllmControlPlane(servers), "/nowhere/at/all")
    with pytest.raises(ConfigError, match="Rank0OnlyPublisher"):
        BroadcastPolicyPublisher(control := VllmControlPlane(servers), SharedMemoryCommunicator(control), src_rank=1)


def test_missing_memory_is_refused_before_the_pause(monkeypatch):
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    servers = WeightServers()
    with pytest.raises(ConfigError, match="no memory for .*No space left on device.*Use transport='file'"):
        make(servers, transport="shared_memory").publish(WEIGHTS, version=1)
    assert "/pause" not in servers.calls()


def test_all_pushes_share_one_memory_block():
    servers = WeightServers()
    publisher = make(servers, transport="shared_memory")
    publisher.publish(WEIGHTS, version=1)
    handles = set(os.listdir("/proc/self/fd"))
    for version in (2, 3):
        publisher.publish({name: weight + version for name, weight in WEIGHTS.items()}, version)
        received = servers.received[servers.servers[0]]
        assert all(torch.equal(received[name], weight + version) for name, weight in WEIGHTS.items())
    assert set(os.listdir("/proc/self/fd")) <= handles


# --- the publisher ---


def test_default_version_is_the_servers_version_plus_one_and_is_what_is_current():
    servers = WeightServers()
    publisher, (server,) = make(servers), servers.servers
    servers.version[server] = "4"
    publisher.publish(WEIGHTS)
    assert servers.version[server] == "5" and publisher.is_current(5) and not publisher.is_current(4)
    servers.version[server] = "default"  # restarted
    assert not publisher.is_current(5)
    servers.failures = [(server, "/weight_info", ConnectionRefusedError("refused"))]
    assert not publisher.is_current(0)


def test_small_buckets_send_the_same_weights_and_dtype_casts_before_the_checksums():
    servers = WeightServers()
    make(servers, bucket_bytes=1, dtype=torch.bfloat16).publish(WEIGHTS, version=1)
    assert servers.calls().count("/update_weights") == 2
    received = servers.received[servers.servers[0]]
    assert all(torch.equal(received[name], weight.to(torch.bfloat16)) for name, weight in WEIGHTS.items())


def test_one_wrong_bit_fails_the_checksum():
    servers = WeightServers()
    servers.flips_a_bit = True
    with pytest.raises(WeightPushError, match="received other values than were sent"):
        make(servers).publish(WEIGHTS, version=3)


def test_a_push_is_tried_as_often_as_attempts_says():
    servers = WeightServers()
    servers.failures = [
        (servers.servers[0], call, RuntimeError("500")) for call in ("/update_weights",) * 2 + ("/pause",)
    ]
    make(servers, attempts=4).publish(WEIGHTS, version=3)
    assert servers.version[servers.servers[0]] == "3" and servers.failures == []


def test_a_restarted_server_gets_the_last_version_again_though_the_trainer_has_changed_its_weights():
    servers = WeightServers()
    publisher, (server,) = make(servers), servers.servers
    assert not publisher.publish_again(), "nothing was sent yet"
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    publisher.publish(weights, version=3)
    servers.log.clear()
    assert publisher.publish_again() and servers.log == [], "the server has it"
    for weight in weights.values():
        weight += 1
    servers.version[server], servers.received[server], servers.checksums[server] = "default", {}, {}
    assert publisher.publish_again() and servers.version[server] == "3"
    assert all(torch.equal(servers.received[server][name], weight) for name, weight in WEIGHTS.items())


def test_after_a_failed_push_the_version_before_it_is_not_sent_again(tmp_path):
    servers = WeightServers()
    publisher = make(servers)
    publisher.publish(WEIGHTS, version=3)
    servers.failures = [(servers.servers[0], "/update_weights", RuntimeError("500"))] * 2
    with pytest.raises(WeightPushError):
        publisher.publish(WEIGHTS, version=4)
    assert not publisher.publish_again(), "its bytes are gone"
    publisher.publish(WEIGHTS, version=5)
    assert publisher.publish_again() and servers.version[servers.servers[0]] == "5"
    with pytest.raises(ConfigError, match="FileCommunicator keeps no weights"):
        make(servers, transport="file", folder=tmp_path).publish_again()


@pytest.mark.parametrize(("rank", "enabled", "num_made"), [("0", True, 1), ("1", True, 0), ("0", False, 0)])
def test_rank_0_creates_one_publisher_and_other_ranks_none(monkeypatch, rank, enabled, num_made):
    monkeypatch.setenv("RANK", rank)
    servers, made = WeightServers(), []
    publisher = Rank0OnlyPublisher(lambda: made.append(make(servers)) or made[-1], enabled=enabled)
    assert not made
    for version in (1, 2):
        publisher.publish(WEIGHTS, version)
    assert len(made) == num_made and publisher.is_current(2)
    servers.version[servers.servers[0]] = "1"  # as if it had been restarted
    assert publisher.is_current(2) is not bool(num_made)


def test_50_publishes_of_an_adapter_do_not_change_the_frozen_weights():
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny_llama().to(torch.bfloat16), config)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    servers = WeightServers()
    servers.shapes = {name: list(weight.shape) for name, weight in dense_parameters(model)}
    publisher = make(servers)
    torch.manual_seed(1)
    for version in range(1, 51):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        publisher.publish(dict(dense_parameters(model)), version)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    merged = "model.layers.0.self_attn.q_proj.weight"
    base = frozen[f"base_model.model.{merged[:-6]}base_layer.weight"]
    assert not torch.equal(servers.received[servers.servers[0]][merged], base)


# --- memory of a GPU ---


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The process seems to have a GPU; its memory is the host's."""
    servers = WeightServers()

    def share(flat: torch.Tensor) -> dict:
        servers.gpu = flat
        return {"gpu": "one"}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("ludic_vllm.publish.vllm.share_cuda_block", share)
    return servers


def cuda_publisher(servers: WeightServers) -> BroadcastPolicyPublisher:
    control = VllmControlPlane(servers, wait_s=0.0)
    return BroadcastPolicyPublisher(control, CudaIpcCommunicator(control, "cpu"), bucket_bytes=16)


def test_a_server_on_the_same_gpu_reads_the_weights_from_the_trainers_memory(on_a_gpu):
    publisher = cuda_publisher(on_a_gpu)
    for version in (1, 2):
        publisher.publish({name: weight + version for name, weight in WEIGHTS.items()}, version)
        received = on_a_gpu.received[on_a_gpu.servers[0]]
        assert all(torch.equal(received[name], weight + version) for name, weight in WEIGHTS.items())
    assert on_a_gpu.calls().index("unmappable") < on_a_gpu.calls().index("/pause")
    on_a_gpu.version[on_a_gpu.servers[0]] = "default"
    assert publisher.publish_again() and on_a_gpu.version[on_a_gpu.servers[0]] == "2", "the block has kept the weights"


def test_gpu_memory_that_a_server_cannot_map_is_refused_before_the_pause(on_a_gpu):
    on_a_gpu.unmappable = ["ValueError: the trainer's weights are on GPU a, this worker on b"]
    with pytest.raises(ConfigError, match=r"cannot map .*on GPU a.*Use transport='shared_memory'"):
        cuda_publisher(on_a_gpu).publish(WEIGHTS, version=1)
    assert "/pause" not in on_a_gpu.calls()


def test_cuda_ipc_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="needs a GPU"):
        make(WeightServers(), transport="cuda_ipc")


def test_a_block_of_gpu_memory_is_described_in_json(monkeypatch):
    """torch's own functions take the handles apart and put them together; between them the description is JSON."""
    flat = torch.zeros(640, dtype=torch.uint8)
    given = (torch.Tensor, flat.size(), flat.stride(), 0, torch.storage.TypedStorage, torch.uint8, 3)
    given += (b"\x00handle\xff", 1024, 64, False, b"counter", 5, b"event", True)
    opened: list[tuple] = []
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (None, given))
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda *parts: opened.append(parts))
    monkeypatch.setattr("ludic_vllm.publish.transfer.gpu_identity", lambda device: f"gpu-{device.index or 0}")
    block = json.loads(json.dumps(share_cuda_block(flat)))
    open_cuda_block(block, torch.device("cuda", 0))
    assert opened == [(*given[:6], 0, *given[7:])], "all but the number of the device, which is the worker's own"
    with pytest.raises(ValueError, match="on GPU gpu-0, this worker on gpu-1"):
        open_cuda_block(block, torch.device("cuda", 1))
