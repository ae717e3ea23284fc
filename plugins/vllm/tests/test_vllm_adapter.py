"""An adapter on a real vLLM server, without its base: what is answered is what transformers computes with it merged."""

import asyncio
import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ludic.distributed import (
    BroadcastPolicyPublisher,
    VllmAdapterPublisher,
    WeightPushError,
    create_vllm_publisher,
)
from ludic.types import ChatResponse, ConfigError, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.publish.adapter import AdapterControlPlane, AdapterFolder, base_parameters, read_adapter
from plugins.vllm.tests.test_vllm_weights import (
    PROMPTS,
    check_versions,
    client_of,
    greedy,
    load,
    logprobs,
    perturbed,
    running_requests,
    weights_of,
)
from plugins.vllm.tests.vllm_fixtures import (
    LORA_RANK,
    RunningServer,
)

peft = pytest.importorskip("peft", reason="the lora extra is not installed")
pytestmark = pytest.mark.integration


def adapted(server: RunningServer, **settings: Any) -> Any:
    """The served base with an adapter of random weights."""
    config = {"r": LORA_RANK, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    return peft.get_peft_model(load(server.model_dir), peft.LoraConfig(**config)).eval()


def change(model: Any, seed: int) -> None:
    """As an optimizer step would: the adapter in place, the base not at all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def merged(model: Any) -> Any:
    return copy.deepcopy(model).merge_and_unload()


def publisher_of(server: RunningServer, model: Any, **settings: Any) -> VllmAdapterPublisher:
    return VllmAdapterPublisher(client_of(server), model, **{"timeout_s": 60.0, **settings})


def request(prompt: list[int], model: str, **sampling: Any) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        model=model,
        prompt_token_ids=prompt,  # type: ignore[arg-type]
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}),
        return_=ReturnSpec.for_rl(),
        seed=sum(prompt) % 1000,
    )


def ask(server: RunningServer, name: str) -> list[ChatResponse]:
    async def all_of_them() -> list[ChatResponse]:
        client = client_of(server)
        answers = await asyncio.gather(*(client.complete_tokens(request(prompt, name)) for prompt in PROMPTS))
        return [response for response, _ in answers]

    return asyncio.run(all_of_them())


def assert_serves(server: RunningServer, model: Any, version: int, *, name: str = "policy") -> None:
    for prompt, response in zip(PROMPTS, ask(server, name), strict=True):
        assert response.completion_token_ids.tolist() == greedy(model, prompt)
        np.testing.assert_allclose(response.completion_logprobs, logprobs(model, response), atol=1e-3)
        assert [run.version for run in response.version_runs] == [version]


def assert_goes_on(server: RunningServer, model: Any, version: int) -> None:
    assert server.ask("GET", "/is_paused") == (200, {"is_paused": False})
    assert_serves(server, model, version)


def test_a_push_serves_the_adapter_under_its_name_and_the_base_under_its_own(lora_server, tmp_path):
    model = adapted(lora_server)
    base = load(lora_server.model_dir)
    publisher = publisher_of(lora_server, model, folder=tmp_path)
    for version, seed in enumerate((1, 2, 3), start=5):
        change(model, seed)
        publisher.publish({}, version=version)
        assert_serves(lora_server, merged(model), version)
        assert_serves(lora_server, base, version, name="tiny")
    assert [greedy(merged(model), prompt) for prompt in PROMPTS] != [greedy(base, prompt) for prompt in PROMPTS]
    folders = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert len(folders) == 2, "the last two stay"
    assert (tmp_path / "policy").resolve() in folders


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"], "r": 3},
        {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"up_proj": 40}},
    ],
    ids=["a part of fused layers", "separate scales"],
)
def test_ranks_and_scales_arrive_as_peft_has_them(lora_server, settings):
    model = adapted(lora_server, **settings)
    publisher = publisher_of(lora_server, model)
    publisher.publish({}, version=1)
    assert_serves(lora_server, merged(model), version=1)


async def push_among_requests(lora_server: RunningServer, model: Any, first: Any, second: Any) -> list[ChatResponse]:
    change(model, 1)
    await asyncio.to_thread(first.publish, {}, 8)
    old = merged(model)
    client = client_of(lora_server)
    prompts = [np.random.default_rng(100 + i).integers(256, size=5 + i).tolist() for i in range(16)]
    asked = [
        asyncio.create_task(client.complete_tokens(request(prompt, "policy", temperature=1.0, max_tokens=300)))
        for prompt in prompts
    ]
    async with asyncio.timeout(60):
        while not await running_requests(lora_server):
            await asyncio.sleep(0.02)
    change(model, 2)
    await asyncio.to_thread(second.publish, {}, 9)
    async with asyncio.timeout(120):
        responses = [response for response, _ in await asyncio.gather(*asked)]
    check_versions(responses, {8: old, 9: merged(model)})
    return responses


@pytest.mark.extended(
    covered_by="plugins/vllm/tests/test_vllm_weights.py::test_a_push_in_the_middle_of_32_requests_loses_none_and_tags_every_token"
)
async def test_a_push_in_the_middle_of_16_requests_loses_none_and_tags_every_token(lora_server):
    model = adapted(lora_server)
    publisher = publisher_of(lora_server, model)
    responses = await push_among_requests(lora_server, model, publisher, publisher)
    assert any([run.version for run in response.version_runs] == [8, 9] for response in responses)


@pytest.mark.extended(covered_by="test_a_server_that_was_killed_comes_back_and_gets_the_adapter_again")
async def test_another_trainer_takes_the_name_over_and_requests_in_flight_are_asked_again(lora_server):
    model = adapted(lora_server)
    first, second = publisher_of(lora_server, model), publisher_of(lora_server, model)
    responses = await push_among_requests(lora_server, model, first, second)
    assert all(len(response.version_runs) == 1 for response in responses)
    assert any(response.version_runs[0].version == 9 for response in responses)


def test_a_server_that_threw_the_adapter_out_reads_the_newest_again(lora_server, tmp_path):
    """Another adapter takes the only place, and new weights of the base forget all of them."""
    model = adapted(lora_server)
    (tmp_path / "first").mkdir()
    publisher_of(lora_server, model, folder=tmp_path / "first").publish({}, version=1)
    publisher = publisher_of(lora_server, model, folder=tmp_path)
    publisher.publish({}, version=1)
    shutil.rmtree(tmp_path / "first")
    change(model, 7)
    publisher.publish({}, version=2)
    other = adapted(lora_server)
    other.save_pretrained(tmp_path / "other")
    body = {"lora_name": "other", "lora_path": str(tmp_path / "other")}
    status, _ = lora_server.ask("POST", "/v1/load_lora_adapter", body)
    assert status == 401, "the guard stands before it"
    asyncio.run(client_of(lora_server).control_post(lora_server.url, "/v1/load_lora_adapter", body))
    assert_serves(lora_server, merged(other), 2, name="other")
    assert_serves(lora_server, merged(model), 2)
    create_vllm_publisher(client_of(lora_server)).publish(weights_of(load(lora_server.model_dir)), version=3)
    assert_serves(lora_server, merged(model), 3)


def test_what_the_server_cannot_hold_is_refused_and_it_goes_on(lora_server, tmp_path):
    model = adapted(lora_server)
    publisher_of(lora_server, model).publish({}, version=1)
    with pytest.raises(
        ConfigError, match=rf"rank 9.* at most {LORA_RANK}. Start it with --enable-lora --max-lora-rank 16"
    ):
        publisher_of(lora_server, adapted(lora_server, r=9)).publish({}, version=2)
    stranger = peft.get_peft_model(perturbed(load(lora_server.model_dir)), model.peft_config["default"])
    with pytest.raises(ConfigError, match="base is not the model .* has other values"):
        publisher_of(lora_server, stranger, name="stranger").publish({}, version=2)
    with pytest.raises(ConfigError, match="already has a model named 'tiny'"):
        publisher_of(lora_server, model, name="tiny").publish({}, version=2)
    assert_goes_on(lora_server, merged(model), version=1)


def test_a_folder_that_the_server_does_not_see_is_an_error_and_nothing_changes(lora_server, tmp_path, monkeypatch):
    model = adapted(lora_server)
    publisher_of(lora_server, model).publish({}, version=1)
    served = merged(model)
    change(model, 3)
    monkeypatch.chdir(tmp_path)  # the server has another folder of this name, its own
    with pytest.raises(ConfigError, match="cannot read /proc/self/cwd/policy-.* Give a folder="):
        publisher_of(lora_server, model, folder="/proc/self/cwd").publish({}, version=2)
    assert_goes_on(lora_server, served, version=1)


def publisher_writing(
    server: RunningServer, model: Any, write: Callable[[Path], None], folder: Path
) -> BroadcastPolicyPublisher:
    """The parts of a VllmAdapterPublisher, with something else in the files."""
    control = AdapterControlPlane(client_of(server), "policy", base_parameters(model), timeout_s=60.0)
    return BroadcastPolicyPublisher(control, AdapterFolder(control, "policy", write, folder))


def test_files_that_cannot_be_loaded_are_an_error_before_any_pause(lora_server, tmp_path):
    model = adapted(lora_server)
    publisher = publisher_of(lora_server, model, folder=tmp_path)
    publisher.publish({}, version=1)
    served = merged(model)

    def half(folder: Path) -> None:
        read_adapter(model).write(folder)
        (folder / "adapter_model.safetensors").write_bytes(b"half of it")

    change(model, 4)
    with pytest.raises(WeightPushError, match=r"in 2 attempts.*continue with their previous weights"):
        publisher_writing(lora_server, model, half, tmp_path).publish(read_adapter(model).tensors, version=2)
    assert_goes_on(lora_server, served, version=1)
    publisher.publish({}, version=2)
    assert_serves(lora_server, merged(model), version=2)


def test_other_values_than_were_sent_are_found_out(lora_server, tmp_path):
    """The server stays paused, and the next push repairs it."""
    model = adapted(lora_server)

    def doubled(folder: Path) -> None:
        adapter = read_adapter(model)
        replace(adapter, tensors={name: tensor * 2 for name, tensor in adapter.tensors.items()}).write(folder)

    with pytest.raises(WeightPushError, match="received other values.* stay paused"):
        publisher_writing(lora_server, model, doubled, tmp_path).publish(read_adapter(model).tensors, version=1)
    assert lora_server.ask("GET", "/is_paused") == (200, {"is_paused": True})
    publisher_of(lora_server, model).publish({}, version=2)
    assert_goes_on(lora_server, merged(model), version=2)


def test_a_server_that_was_killed_comes_back_and_gets_the_adapter_again(lora_server):
    model = adapted(lora_server)
    publisher = publisher_of(lora_server, model)
    publisher.publish({}, version=4)
    assert publisher.is_current(4)
    client = VLLMChatClient(servers=[lora_server.url], max_retries=1, wait_s=0.01)

    async def answer() -> ChatResponse:
        return (await client.complete_tokens(request(PROMPTS[0], "policy")))[0]

    asyncio.run(answer())
    lora_server.process.kill()
    assert not publisher.is_current(4)
    lora_server.process.start()
    lora_server.wait()
    assert not publisher.is_current(4)
    with pytest.raises(RuntimeError, match="has lost 'policy'"):  # not a ConfigError: an episode fails, the run goes on
        asyncio.run(answer())
    publisher.publish({}, version=4)
    assert publisher.is_current(4)
    assert asyncio.run(answer()).completion_token_ids.tolist() == greedy(merged(model), PROMPTS[0])
    assert_serves(lora_server, merged(model), version=4)
