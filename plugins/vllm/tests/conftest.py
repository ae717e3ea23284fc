"""One real vLLM server for all tests of this plug-in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic_vllm.vllm_server import VLLMServerProcess
from plugins.vllm.tests.vllm_fixtures import (
    LORA,
    RunningServer,
    save_tiny_model,
    skip_without_vllm,
    start_warm_server,
)


@pytest.fixture(scope="session")
def vllm_model_dir(tmp_path_factory) -> Path:
    """A tiny Llama with a byte tokenizer."""
    pytest.importorskip("transformers")
    return save_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny")


@pytest.fixture(scope="session")
def vllm_server(vllm_model_dir, tmp_path_factory) -> Iterator[RunningServer]:
    """One real vLLM server for all tests. A test that pushes weights pushes the first
    ones back; one that pauses or kills it leaves it running."""
    skip_without_vllm()
    yield from running(start_warm_server(vllm_model_dir, tmp_path_factory.mktemp("vllm-run")), vllm_model_dir)


@pytest.fixture(scope="session")
def lora_server(vllm_server) -> Iterator[RunningServer]:
    """Another server with the same model and the same control token, which takes adapters; one at a time."""
    yield from running(start_warm_server(vllm_server.model_dir, vllm_server.run_folder, *LORA), vllm_server.model_dir)


def running(process: VLLMServerProcess, model_dir: Path) -> Iterator[RunningServer]:
    try:
        server = RunningServer(process=process, model_dir=model_dir, run_folder=process.log.parent)
        server.wait()
        yield server
    finally:
        process.stop()
