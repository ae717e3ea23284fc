"""Pushed weights on vLLM's GPU build, for Jamba, which its CPU build cannot run, Llama 4 and gpt-oss."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

from ludic.distributed import create_vllm_publisher  # noqa: E402 - after the skip
from ludic.models.lora import dense_parameters  # noqa: E402
from ludic_vllm.vllm_server import VLLMServerProcess, start_vllm_server, wait_for_vllm_health  # noqa: E402
from plugins.vllm.tests.test_cuda_vllm import (  # noqa: E402
    ask,
    assert_serves,
    client_of,
    load,
    moved,
    skip_without_gpu_build,
)
from plugins.vllm.tests.vllm_fixtures import VOCAB_SIZE, byte_tokenizer  # noqa: E402
from tests.tiny_families import FAMILIES, family_model  # noqa: E402

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "initializer_range": 0.1, "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "jamba": {"mamba_d_state": 16, "mamba_d_conv": 4},
    "llama4": {"head_dim": 64, "intermediate_size_mlp": 512, "attention_chunk_size": 1024, "floor_scale": 8192},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131_072},
}
"""Sizes that vLLM's kernels take, instead of those in tests/tiny_families.py."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, VLLMServerProcess]]]:
    """A server for each family, all started at once."""
    skip_without_gpu_build()
    flags = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", "512M", "--served-model-name", "tiny", "--enforce-eager"]
    started: dict[str, tuple[Path, VLLMServerProcess]] = {}
    try:
        for name in SIZES:
            if not hasattr(transformers, FAMILIES[name].config):
                continue
            folder = tmp_path_factory.mktemp(name) / "model"
            family_model(name, **{**_SIZES, **SIZES[name]}).to(torch.bfloat16).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            process = start_vllm_server(
                folder, port=0, max_model_len=2048, stream_output=False, gpu_memory_utilization=0.05, extra_args=flags,
                run_folder=folder.parent,
            )  # fmt: skip
            started[name] = folder, process
        yield started
    finally:
        for _, process in started.values():
            process.stop()


def ready(servers: dict[str, tuple[Path, VLLMServerProcess]], name: str) -> tuple[Any, VLLMServerProcess]:
    """The model and its server."""
    if name not in servers:
        pytest.skip(f"this transformers has no {name}")
    folder, process = servers[name]
    wait_for_vllm_health(process.command.host, process.command.port, process, timeout_s=400)
    return load(folder), process


@pytest.mark.parametrize("name", SIZES)
def test_pushed_weights_are_served(servers, name):
    old, process = ready(servers, name)
    assert_serves(ask(process), old, moved(old, 2), 0)
    new = moved(old, 1)
    publisher = create_vllm_publisher(client_of(process), transport="cuda_ipc", timeout_s=60.0)
    publisher.publish(dict(dense_parameters(new)), version=1)
    assert_serves(ask(process), new, old, 1)
