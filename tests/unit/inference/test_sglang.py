"""The SGLang client and publisher against a stand-in that speaks SGLang 0.5.23's wire."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ludic.distributed.publish.interfaces import WeightPushError
from ludic.distributed.publish.sglang import SGLangPublisher
from ludic.inference.http import EndpointError
from ludic.inference.local import LocalEngine
from ludic.inference.sglang.client import SGLangChatClient
from ludic.models.tiny import make_tiny
from ludic.run import build
from ludic.training.loggers import read_metrics
from ludic.types import (
    ChatClient,
    ConfigError,
    PromptTooLong,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
    VersionedClient,
    VersionRun,
)
from tests.unit.inference.sglang_fake import FakeSGLang, fake
from tests.unit.run.test_run import SMALL, Letter


def a_request(**fields: Any) -> TokenCompletionRequest:
    sampling = SamplingParams(**{"max_tokens": 4, "temperature": 1.0, **fields.pop("sampling", {})})
    return TokenCompletionRequest(
        "m", np.array([1, 2, 3]), sampling=sampling, **{"return_": ReturnSpec.for_rl(), **fields}
    )


def client_of(*servers: FakeSGLang, **settings: Any) -> SGLangChatClient:
    return SGLangChatClient([server.url for server in servers], **{"wait_s": 0.0, **settings})


async def test_tokens_log_probs_and_versions_come_back():
    async with fake() as server:
        client = client_of(server)
        assert isinstance(client, ChatClient) and isinstance(client, VersionedClient)
        request = a_request()
        response, _ = await client.complete_tokens(request)
        assert response.completion_token_ids.tolist() == [4, 5, 6, 7] and response.text == "4 5 6 7"
        assert response.completion_logprobs.tolist() == [-0.5] * 4 and response.finish_reason == "length"
        assert response.prompt_token_ids is request.prompt_token_ids
        assert response.version_runs == (VersionRun(0, 4),), "a server without a push has version 0"
        server.spans = [("6", 0, 1), ("7", 1, 4)]
        response, _ = await client.complete_tokens(a_request(return_=ReturnSpec.for_eval()))
        assert response.version_runs == (VersionRun(6, 1), VersionRun(7, 3)) and response.completion_logprobs is None
        assert await client.is_healthy(server.url) and await client.get_policy_version() == 0
        await client.close()


async def test_the_request_body_holds_every_setting():
    sampling = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2, "stop": ("x", "y"),
                "stop_token_ids": (4,), "ignore_eos": True, "frequency_penalty": 0.5}  # fmt: skip
    async with fake() as server:
        client = client_of(server)
        await client.complete_tokens(a_request(sampling=sampling, seed=(1 << 63) + 3))
        await client.complete_tokens(a_request())
        await client.close()
    asked, plain = server.requests
    assert asked["input_ids"] == [1, 2, 3] and asked["return_logprob"] is True and asked["stream"] is False
    assert asked["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.5,
        "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 2, "ignore_eos": True,
        "skip_special_tokens": True, "stop": ["x", "y"], "stop_token_ids": [4], "sampling_seed": 3,
    }  # fmt: skip
    assert plain["sampling_params"]["top_k"] == -1 and "sampling_seed" not in plain["sampling_params"]


async def test_failures_are_retried_and_wrong_requests_are_not():
    async with fake(faults=["abort", "503"]) as server:
        client = client_of(server)
        response, _ = await client.complete_tokens(a_request())
        assert len(server.requests) == 3 and len(response.completion_token_ids) == 4
        with pytest.raises(PromptTooLong, match="512"):
            await client.complete_tokens(a_request(sampling={"max_tokens": 600}))
        assert len(server.requests) == 4
        server.faults = ["404"]
        with pytest.raises(ConfigError, match="Check the address"):
            await client.complete_tokens(a_request())
        await client.close()
    with pytest.raises(ConfigError, match="needs a server"):
        SGLangChatClient([])
    with pytest.raises(ConfigError, match="address alone"):
        SGLangChatClient(["http://127.0.0.1:1/v1"])


async def test_a_push_pauses_loads_and_continues_every_server(tmp_path: Path):
    weights = {"a.weight": torch.ones(2, 3), "lm_head.weight": torch.zeros(2)}

    def save_config(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    async with fake(admin_key="k") as first, fake(admin_key="k") as second:
        client = client_of(first, second, admin_api_key="k")
        publisher = client.publisher = SGLangPublisher(client, tmp_path, save_config=save_config)
        await asyncio.to_thread(publisher.publish, weights, 3)
        for server in (first, second):
            assert [path for path, _ in server.control] == [
                "/pause_generation", "/update_weights_from_disk", "/continue_generation",
            ]  # fmt: skip
            assert server.version == "3" and not server.is_paused
        assert await asyncio.to_thread(publisher.is_current, 3) and not await asyncio.to_thread(publisher.is_current, 4)
        assert await asyncio.to_thread(client.sync_weights, weights) == "4"
        assert [path.name for path in tmp_path.iterdir()] == ["version_4"], "the version before is not needed"
        second.loads = False
        with pytest.raises(WeightPushError, match="Version 5 did not reach every server.*Failed to get weights"):
            await asyncio.to_thread(publisher.publish, weights, 5)
        assert not first.is_paused and not second.is_paused, "both go on"
        with pytest.raises(WeightPushError, match="401"):
            await asyncio.to_thread(
                SGLangPublisher(client_of(first), tmp_path, save_config=save_config).publish, weights, 6
            )
        with pytest.raises(EndpointError, match="401"):
            await client_of(first).control(first.url, "/pause_generation", {"mode": "retract"})


@contextmanager
def in_a_thread(server: FakeSGLang) -> Iterator[str]:
    """The URL of the server, which answers from an event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_run_trains_with_sglang_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stand-in starts with other weights; after the first push its log-probs are the trainer's."""
    monkeypatch.chdir(tmp_path)
    other = make_tiny(seed=7)
    engine = LocalEngine(other.model, other.tokenizer, max_model_len=64)
    server = FakeSGLang(engine)
    settings = {**SMALL, "env": Letter, "rollouts_per_update": 16, "engine": "sglang", "name": "run"}
    try:
        with in_a_thread(server) as url, build(**settings, server=(url,)) as run:
            run.train(steps=2)
    finally:
        engine.close()
    rows = [row for row in read_metrics(Path("runs/run/metrics.jsonl")) if "train/loss" in row]
    assert len(rows) == 2 and server.version == "2"
    for row in rows:
        assert row["train/ratio_token_mean"] == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ConfigError, match="--server http"), build(**settings) as run:
        run.train(steps=1)
