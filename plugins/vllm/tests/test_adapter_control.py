"""The calls of an adapter push: their order on several servers, and the state after a failure."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ludic.distributed import VllmAdapterPublisher, WeightPushError
from ludic.models.loading import tiny_llama
from ludic.types import ConfigError
from ludic_vllm.publish.adapter import base_parameters
from ludic_vllm.publish.transfer import checksum
from plugins.vllm.tests.in_memory import FakeServers

peft = pytest.importorskip("peft", reason="the lora extra is not installed")

FIRST, SECOND = "http://127.0.0.1:1", "http://127.0.0.1:2"


class AdapterServers(FakeServers):
    """Two servers that load the pushed adapter."""

    def __init__(self, model, *, max_rank: int | None = 8) -> None:
        super().__init__(FIRST, SECOND)
        self.shapes = {name: list(weight.shape) for name, weight in base_parameters(model).items()}
        self.limits = None if max_rank is None else {"max_rank": max_rank}
        self.registered: dict[str, dict[str, str]] = {server: {} for server in self.servers}
        self.adopted: dict[str, list[str]] = {server: [] for server in self.servers}
        self.left_out: list[str] = []

    def fail(self, server: str, call: str, times: int = 1) -> None:
        self.failures = [(server, call, RuntimeError("it broke")) for _ in range(times)]

    def restart(self, server: str) -> None:
        self.version[server], self.registered[server], self.adopted[server] = "default", {}, []

    async def control_get(self, server, path, params=None, timeout_s=1.0):
        if path == "/weight_info":
            return {"weight_version": self.version[server]}
        if path == "/is_sleeping":
            return {"is_sleeping": False}
        return {
            "data": [
                {"id": "base", "root": "base"},
                *({"id": i, "root": r} for i, r in self.registered[server].items()),
            ]
        }

    def answer(self, server, call, body, params):
        return {"results": [self._result(server, call, body)]}

    def _result(self, server, call, body):
        if call == "/update_weight_version":
            self.version[server] = body["new_version"]
        if call == "/v1/load_lora_adapter":
            self.registered[server][body["lora_name"]] = body["lora_path"]
        if call == "/v1/unload_lora_adapter":
            del self.registered[server][body["lora_name"]]
        if call == "adopt_adapter":
            self.adopted[server].append(body["args"][0])
        answers = {
            "lora_limits": self.limits, "adopted": self.adopted[server], "parameters": self.shapes, "base_values": {},
            "unreadable": [], "try_adapter": self.left_out, "adapter_ids": [],
        }  # fmt: skip
        return self._received(*body["args"]) if call == "received_adapter" else answers.get(call)

    def _received(self, name, path, tensors):
        read = load_file(Path(path) / "adapter_model.safetensors")
        return {"checksums": {tensor: checksum(read[tensor]) for tensor in tensors}, "differing": []}


@pytest.fixture
def model():
    return peft.get_peft_model(tiny_llama(16, width=16, layers=1), peft.LoraConfig(r=4, target_modules=["q_proj"]))


def make(servers, model, **settings) -> VllmAdapterPublisher:
    return VllmAdapterPublisher(servers, model, **{"wait_s": 0.0, **settings})


def test_an_adapter_is_registered_once_and_then_replaced(model, tmp_path):
    """vLLM's own load_inplace would be carried by every later request."""
    servers = AdapterServers(model)
    publisher = make(servers, model, folder=tmp_path)
    publisher.publish({}, version=1)
    assert servers.registered[FIRST] == {"policy": str(tmp_path / "policy")}
    servers.log.clear()
    publisher.publish({}, version=2)
    assert servers.calls(FIRST) == [
        "lora_limits", "adopted", "unreadable", "try_adapter", "/pause", "adopted", "replace_adapter", "received_adapter",
        "/update_weight_version", "/reset_prefix_cache", "/resume",
    ]  # fmt: skip
    kinds = [call for _, call in servers.log]
    assert kinds[::2] == kinds[1::2], "each step on both before the next on either"
    assert servers.version == {FIRST: "2", SECOND: "2"}


def test_a_restarted_server_gets_the_adapter_registered_again(model, tmp_path):
    servers = AdapterServers(model)
    publisher = make(servers, model, folder=tmp_path)
    publisher.publish({}, version=3)
    assert publisher.is_current(3)
    servers.restart(SECOND)
    assert not publisher.is_current(3)
    servers.log.clear()
    publisher.publish({}, version=3)
    assert "replace_adapter" in servers.calls(FIRST) and "/v1/load_lora_adapter" not in servers.calls(FIRST)
    assert "replace_adapter" not in servers.calls(SECOND) and servers.registered[SECOND]
    assert publisher.is_current(3)


def test_a_load_that_fails_on_one_server_changes_no_version(model):
    servers = AdapterServers(model)
    publisher = make(servers, model)
    publisher.publish({}, version=1)
    servers.fail(SECOND, "replace_adapter", times=2)
    with pytest.raises(WeightPushError, match=rf"2 attempts.*{SECOND}.*it broke.*stay paused"):
        publisher.publish({}, version=2)
    assert servers.version == {FIRST: "1", SECOND: "1"} and all(servers.paused.values())
    publisher.publish({}, version=2)
    assert servers.version == {FIRST: "2", SECOND: "2"} and not any(servers.paused.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rank": None}, r"runs without LoRA.* --enable-lora --max-lora-rank 8"),
        ({"max_rank": 1}, r"rank 4, but .* takes at most 1\. Start it with --enable-lora --max-lora-rank 8"),
    ],
    ids=["no LoRA", "rank"],
)
def test_error_names_a_server_without_suitable_lora_settings_before_the_pause(model, settings, message):
    servers = AdapterServers(model, **settings)
    with pytest.raises(ConfigError, match=message):
        make(servers, model).publish({}, version=1)
    assert "/pause" not in servers.calls(FIRST)


def test_a_module_that_a_server_does_not_load_is_an_error(model):
    servers = AdapterServers(model)
    servers.left_out = ["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ConfigError, match=r"no place for .* such as model\.layers\.0\.self_attn\.q_proj"):
        make(servers, model).publish({}, version=1)
    assert "/pause" not in servers.calls(FIRST)


def test_a_base_of_another_shape_is_an_error(model):
    servers = AdapterServers(model)
    servers.shapes["model.norm.weight"] = [3]
    with pytest.raises(ConfigError, match=r"base is not the model .* model\.norm\.weight has shape \[16\]"):
        make(servers, model).publish({}, version=1)


def test_a_failed_push_keeps_the_files_of_the_served_version(model, tmp_path):
    servers = AdapterServers(model)
    publisher = make(servers, model, folder=tmp_path)
    publisher.publish({}, version=1)
    served = (tmp_path / "policy").resolve()
    for version in (2, 3):
        servers.fail(FIRST, "try_adapter", times=2)
        with pytest.raises(WeightPushError, match="continue with their previous weights"):
            publisher.publish({}, version=version)
    assert (tmp_path / "policy").resolve() == served and (served / "adapter_model.safetensors").is_file()
