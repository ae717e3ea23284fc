"""New weights on a real vLLM server: what it answers afterwards is what transformers computes with the same weights."""

import asyncio
import copy
import hashlib
import os
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ludic.distributed import (
    BroadcastPolicyPublisher,
    VllmControlPlane,
    WeightPushError,
    create_vllm_publisher,
)
from ludic.models.lora import dense_parameters
from ludic.types import ChatResponse, ConfigError, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.publish.transfer import describe, split_into_buckets
from ludic_vllm.publish.vllm import SharedMemoryCommunicator
from plugins.vllm.tests import warm_vllm
from plugins.vllm.tests.vllm_fixtures import (
    ROOT,
    RunningServer,
    save_tiny_model,
    skip_without_vllm,
    start_warm_server,
    tiny_config,
)
from tests.extended import cases

pytestmark = pytest.mark.integration

NUM_NEW = 24
PROMPTS = [np.random.default_rng(i).integers(256, size=length).tolist() for i, length in enumerate((3, 40, 300))]
"""The last is longer than two blocks of the prefix cache."""


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def perturbed(model: Any, seed: int = 1) -> Any:
    """Every weight moved by a tenth of its standard deviation."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = parameter.std() if parameter.std() > 0 else 1.0
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1 * spread)
    return other


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(dense_parameters(model))


def client_of(*servers: Any, token: str | None = None) -> VLLMChatClient:
    first = servers[0]
    return VLLMChatClient(servers=[s.url for s in servers], control_token=token or first.control_token)


def publisher_of(*servers: Any, token: str | None = None, **settings: Any) -> BroadcastPolicyPublisher:
    publisher = create_vllm_publisher(client_of(*servers, token=token), **{"timeout_s": 60.0, **settings})
    assert isinstance(publisher, BroadcastPolicyPublisher)
    return publisher


def request(prompt: list[int], **sampling: Any) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        model="tiny",
        prompt_token_ids=prompt,  # type: ignore[arg-type]
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True, **sampling}),
        return_=ReturnSpec.for_rl(),
        seed=sum(prompt) % 1000,
    )


def ask(server: Any) -> list[ChatResponse]:
    """Greedy answers to the three prompts."""

    async def all_of_them() -> list[ChatResponse]:
        client = client_of(server)
        answers = await asyncio.gather(*(client.complete_tokens(request(prompt)) for prompt in PROMPTS))
        return [response for response, _ in answers]

    return asyncio.run(all_of_them())


_GREEDY: dict[bytes, list[int]] = {}


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """What transformers answers; computed once for the same weights, which many tests push."""
    digest = hashlib.sha256(repr((model.config, prompt)).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.contiguous().numpy().tobytes())
    key = digest.digest()
    if key not in _GREEDY:
        _GREEDY[key] = _greedy(model, prompt)
    return _GREEDY[key]


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NUM_NEW):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def logprobs(model: Any, response: ChatResponse) -> np.ndarray[Any, Any]:
    prompt, completion = response.prompt_token_ids.tolist(), response.completion_token_ids.tolist()
    logits_TV = model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
    logps_NV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
    return logps_NV.gather(-1, torch.tensor(completion)[:, None])[:, 0].numpy()


def assert_serves(server: Any, model: Any, version: int) -> None:
    for prompt, response in zip(PROMPTS, ask(server), strict=True):
        assert response.completion_token_ids.tolist() == greedy(model, prompt)
        np.testing.assert_allclose(response.completion_logprobs, logprobs(model, response), atol=1e-3)
        assert [run.version for run in response.version_runs] == [version]


@pytest.fixture
def served(vllm_server):
    """The server, and the model that it began with; which is pushed back at the end."""
    model = load(vllm_server.model_dir)
    yield vllm_server, model
    publisher_of(vllm_server).publish(weights_of(model), version=0)


@pytest.mark.parametrize(
    "bucket_bytes",
    cases([256 << 20, 40000], default=[40000]),
    ids=["one bucket", "buckets"],
)
@pytest.mark.parametrize("transport", ["file", "shared_memory", "gloo"])
def test_a_push_changes_the_answers_to_those_of_transformers_and_back(served, transport, bucket_bytes):
    server, model = served
    other = perturbed(model)
    assert [greedy(other, prompt) for prompt in PROMPTS] != [greedy(model, prompt) for prompt in PROMPTS]
    publisher = publisher_of(server, transport=transport, bucket_bytes=bucket_bytes)
    publisher.publish(weights_of(other), version=5)
    assert_serves(server, other, version=5)
    publisher.publish(weights_of(model))
    assert_serves(server, model, version=6)


def test_what_is_staged_for_the_next_push_does_not_change_what_is_served(served):
    """The loader must have copied everything out of the shared memory that is filled again."""
    server, model = served
    control = VllmControlPlane(client_of(server), timeout_s=60.0)
    comm = SharedMemoryCommunicator(control)
    BroadcastPolicyPublisher(control, comm).publish(weights_of(model), version=1)
    other = weights_of(perturbed(model))
    comm.stage(split_into_buckets(describe(other), 256 << 20), other)
    assert_serves(server, model, version=1)


_COPIED = """
import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload, record_metadata_for_reloading
from ludic_vllm.inside.reload import LoadsCopies, is_waiting, unloaded_layers
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4, 2), False), nn.Parameter(torch.zeros(3), False)
model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("loaded", "copied", "tied", "dropped")})
model["tied"].weight = model["loaded"].weight
model.update({"copied pair": Pair(), "loaded pair": Pair(), "norm": nn.LayerNorm(2)})
record_metadata_for_reloading(model)
initialize_layerwise_reload(model)
def load(name, value):
    weight = dict(model.named_parameters())[name]
    weight.weight_loader(weight, torch.full(weight.shape, value))
with torch.no_grad():
    model["dropped"].weight.copy_(torch.ones(2, 2))
    copies = LoadsCopies(model)
    with copies:
        load("loaded.weight", 1.0)
        load("loaded pair.b", 7.0)
        load("loaded pair.a", 8.0)
        model["copied"].weight.copy_(torch.ones(2, 2))
        held = model["copied pair"].a
        held.data[2:].copy_(torch.full((2, 2), 3.0))
        held.data[:2].copy_(torch.full((2, 2), 2.0))
    print(unloaded_layers(model), is_waiting(model["copied pair"]))
    with copies:  # the next part of the push
        model["copied pair"].b.copy_(torch.arange(3.0))
    print(unloaded_layers(model), is_waiting(model["copied pair"]))
print(*(model[name].weight.sum().item() for name in ("loaded", "copied")))
for name in ("copied pair", "loaded pair"):
    print(model[name].a.tolist(), model[name].b.tolist())
"""


def test_what_a_models_loader_copies_past_the_reload_is_loaded_and_what_gets_nothing_is_found():
    """vLLM itself would drop it: gpt-oss's experts and sinks."""
    skip_without_vllm()
    done = subprocess.run(
        [warm_vllm.python(), "-c", _COPIED],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'plugins/vllm'}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-5:] == [
        "['dropped', 'norm'] True",
        "['dropped', 'norm'] False",
        "4.0 4.0",
        "[[2.0, 2.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0]] [0.0, 1.0, 2.0]",
        "[[8.0, 8.0], [8.0, 8.0], [8.0, 8.0], [8.0, 8.0]] [7.0, 7.0, 7.0]",
    ], done.stderr


def test_weights_in_half_precision_are_cast_by_the_server(served):
    server, model = served
    other = perturbed(model)
    publisher_of(server, dtype=torch.bfloat16).publish(weights_of(other), version=2)
    for parameter in other.parameters():  # not other.to(…), which would round the rotary frequencies as well
        parameter.data = parameter.data.to(torch.bfloat16).float()
    assert_serves(server, other, version=2)


def test_an_adapter_is_published_merged(served):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    server, model = served
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    publisher_of(server).publish(weights_of(adapted), version=3)
    assert_serves(server, copy.deepcopy(adapted).merge_and_unload(), version=3)


async def running_requests(server: Any) -> int:
    def read() -> str:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            return answer.read().decode()

    found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", await asyncio.to_thread(read), re.MULTILINE)
    return int(float(found[1])) if found else 0


async def push_among_requests(server: Any, other: Any, version: int, pause: str) -> list[ChatResponse]:
    """32 requests are under way at any time until the push has returned; their lengths differ, so they do not end together."""
    client = client_of(server)
    responses = []
    is_pushed = False

    async def ask_until_pushed(slot: int) -> None:
        prompt = np.random.default_rng(100 + slot).integers(256, size=5 + slot).tolist()
        while not is_pushed:
            length = 70 + 3 * slot
            response, _ = await client.complete_tokens(request(prompt, temperature=1.0, max_tokens=length))
            assert len(response.completion_token_ids) == length and response.finish_reason == "length"
            responses.append(response)

    async with asyncio.timeout(180), asyncio.TaskGroup() as group:
        for slot in range(32):
            group.create_task(ask_until_pushed(slot))
        while not await running_requests(server):
            await asyncio.sleep(0.02)
        publisher = publisher_of(server, pause=pause)
        await asyncio.to_thread(publisher.publish, weights_of(other), version)
        is_pushed = True
    assert len(responses) >= 32
    return responses


def check_versions(responses: list[ChatResponse], models: dict[int, Any]) -> None:
    """Each token's log-prob is that of the version it is tagged with, computed over the whole text before it."""
    for response in responses:
        of_version = {run.version: logprobs(models[run.version], response) for run in response.version_runs}
        tags = [run.version for run in response.version_runs for _ in range(run.length)]
        expected = [of_version[version][position] for position, version in enumerate(tags)]
        np.testing.assert_allclose(response.completion_logprobs, expected, atol=1e-3)


async def test_a_push_in_the_middle_of_32_requests_loses_none_and_tags_every_token(served):
    server, model = served
    other = perturbed(model)
    publisher_of(server).publish(weights_of(model), version=8)
    responses = await push_among_requests(server, other, 9, "keep")
    check_versions(responses, {8: model, 9: other})
    assert any([run.version for run in response.version_runs] == [8, 9] for response in responses)


async def test_requests_that_are_ended_are_asked_again_by_the_client(served):
    server, model = served
    other = perturbed(model)
    publisher_of(server).publish(weights_of(model), version=8)
    responses = await push_among_requests(server, other, 9, "abort")
    check_versions(responses, {8: model, 9: other})
    assert all(len(response.version_runs) == 1 for response in responses)
    assert any(response.version_runs[0].version == 9 for response in responses)


def test_a_wrong_shape_is_refused_and_the_server_goes_on(served):
    server, model = served
    publisher = publisher_of(server)
    publisher.publish(weights_of(model), version=1)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=rf"{name} has shape \[3, 3\], the server's has \[128, 64\]"):
        publisher.publish({**weights_of(model), name: torch.zeros(3, 3)}, version=2)
    assert server.ask("GET", "/is_paused") == (200, {"is_paused": False})
    assert_serves(server, model, version=1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("self_attn.q_proj", (5, 5)), ("self_attn.o_proj", (32, 128))],
    ids=["waits in a queue", "breaks while a layer is put together"],
)
def test_a_push_after_one_that_broke_in_the_middle_repairs_the_server(served, tmp_path, name, shape):
    """As after the death of a trainer, or with weights of a wrong shape in the loader's hands."""
    from safetensors.torch import save_file

    server, model = served
    control = VllmControlPlane(client_of(server), timeout_s=60.0)
    control.announce_update_batch([], 2)
    bad = {f"model.layers.0.{name}.weight": torch.zeros(shape)}
    save_file(bad, tmp_path / "bad.safetensors")
    (bucket,) = split_into_buckets(describe(bad), 1000)
    with pytest.raises(WeightPushError):
        control.load(bucket, {"kind": "file", "path": str(tmp_path / "bad.safetensors")}).result()
        control.finalize_update(2, {})
    assert server.ask("GET", "/is_paused") == (200, {"is_paused": True})
    other = perturbed(model)
    publisher_of(server).publish(weights_of(other), version=3)
    assert_serves(server, other, version=3)


def test_a_part_of_the_weights_is_never_taken_for_all_of_them(served):
    server, model = served
    whole = weights_of(model)
    part = {name: whole[name] for name in sorted(whole)[:4]}
    with pytest.raises(ConfigError, match="is missing"):
        publisher_of(server).publish(part, version=2)
    control = VllmControlPlane(client_of(server), timeout_s=60.0)
    control.announce_update_batch(describe(part), 2)
    with pytest.raises(WeightPushError, match="never arrived"):
        control.finalize_update(2, {})
    publisher_of(server).publish(whole, version=3)
    assert_serves(server, model, version=3)


@pytest.mark.parametrize("transport", cases(["shared_memory", "gloo"], default=["gloo"]))
def test_two_servers_get_the_same_version(served, lora_server, transport):
    server, model = served
    other = perturbed(model)
    publisher = publisher_of(server, lora_server, transport=transport)
    publisher.publish(weights_of(other), version=11)
    for one in (server, lora_server):
        assert_serves(one, other, version=11)
    publisher.publish(weights_of(model), version=0)


# --- a mixture of experts ---


def mixture_config():
    from transformers import Qwen3MoeConfig

    sizes = tiny_config().to_dict()
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return Qwen3MoeConfig(
        **{name: sizes[name] for name in names},
        initializer_range=0.3,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def test_a_push_changes_the_experts_of_a_mixture(tmp_path):
    skip_without_vllm()
    folder = save_tiny_model(tmp_path / "model", mixture_config())
    process = start_warm_server(folder, tmp_path)
    try:
        server = RunningServer(process=process, model_dir=folder, run_folder=tmp_path)
        server.wait()
        model = load(folder)
        assert_serves(server, model, version=0)
        other = perturbed(model)
        publisher_of(server).publish(weights_of(other), version=5)
        assert_serves(server, other, version=5)
    finally:
        process.kill()
