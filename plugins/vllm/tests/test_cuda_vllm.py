"""vLLM and a trainer on one GPU: live weights by every transport, the adapter alone. Runs where there are a GPU and vLLM's GPU build."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

from ludic.distributed import VllmAdapterPublisher, WeightPushError, create_vllm_publisher  # noqa: E402 - after the skip
from ludic.models.lora import dense_parameters  # noqa: E402
from ludic.types import (  # noqa: E402
    ChatResponse,
    ConfigError,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
)
from ludic_vllm.client import VLLMChatClient  # noqa: E402
from ludic_vllm.command import find_vllm  # noqa: E402
from ludic_vllm.publish.control import VllmControlPlane  # noqa: E402
from ludic_vllm.vllm_server import VLLMServerProcess, start_vllm_server, wait_for_vllm_health  # noqa: E402
from plugins.vllm.tests.vllm_fixtures import LORA, LORA_RANK, VOCAB_SIZE, save_tiny_model  # noqa: E402

NUM_NEW = 48
PROMPTS = [np.random.default_rng(i).integers(256, size=length).tolist() for i, length in enumerate((3, 40, 300, 600))]
"""The last two are longer than several blocks of the prefix cache."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.1, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", config)


def skip_without_gpu_build() -> None:
    try:
        install = find_vllm()
    except ConfigError as error:
        pytest.skip(f"no vLLM on this machine: {error}")
    if install.is_cpu:
        pytest.skip(f"{install.python} has vLLM's CPU build")


@pytest.fixture(scope="module")
def servers(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServerProcess]]:
    """One server for all weights and one for adapters, which start side by side."""
    skip_without_gpu_build()
    flags = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", "128M", "--served-model-name", "tiny"]
    started = [
        start_vllm_server(
            model_dir, port=0, max_model_len=2048, stream_output=False, gpu_memory_utilization=0.1,
            extra_args=[*flags, "--enable-sleep-mode", *more], run_folder=tmp_path_factory.mktemp("server"),
        )
        for more in ((), LORA)
    ]  # fmt: skip
    try:
        for process in started:
            wait_for_vllm_health(process.command.host, process.command.port, process, timeout_s=400)
        yield started
    finally:
        for process in started:
            process.stop()


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()


def moved(model: Any, seed: int) -> Any:
    """Every weight moved by a fifth of its standard deviation."""
    other, generator = copy.deepcopy(model), torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = float(parameter.float().std()) or 1.0
            noise = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.add_((0.2 * spread * noise).to(parameter.dtype))
    return other


def client_of(process: VLLMServerProcess) -> VLLMChatClient:
    return VLLMChatClient(servers=[process.url], control_token=process.control_token)


def ask(process: VLLMServerProcess, model: str = "tiny") -> list[ChatResponse]:
    sampling = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True)

    async def all_of_them() -> list[ChatResponse]:
        client = client_of(process)
        requests = [
            TokenCompletionRequest(
                model=model,
                prompt_token_ids=prompt,  # type: ignore[arg-type]
                sampling=sampling,
                return_=ReturnSpec.for_rl(),
                seed=number,
            )
            for number, prompt in enumerate(PROMPTS)
        ]
        answers = await asyncio.gather(*(client.complete_tokens(request) for request in requests))
        await client.close()
        return [response for response, _ in answers]

    return asyncio.run(all_of_them())


@torch.no_grad()
def logprobs(model: Any, response: ChatResponse) -> np.ndarray[Any, Any]:
    prompt, completion = response.prompt_token_ids.tolist(), response.completion_token_ids.tolist()
    logits_TV = model(input_ids=torch.tensor([prompt + completion]).cuda()).logits[0].float()
    logps_NV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
    return logps_NV.gather(-1, torch.tensor(completion).cuda()[:, None])[:, 0].cpu().numpy()


def distance(model: Any, responses: list[ChatResponse]) -> float:
    """Mean difference of the server's log-probs from those of `model`."""
    return float(np.mean([np.abs(r.completion_logprobs - logprobs(model, r)).mean() for r in responses]))


def assert_serves(responses: list[ChatResponse], model: Any, old: Any, version: int) -> None:
    """The log-probs are those of `model` as far as bf16 can tell, and not those of `old`. Kept keys of old prompts would show."""
    exact = copy.deepcopy(model).float()
    rounding = float(np.mean([np.abs(logprobs(model, r) - logprobs(exact, r)).mean() for r in responses]))
    assert distance(exact, responses) < 4 * rounding + 1e-3
    assert distance(old, responses) > 20 * rounding
    assert {run.version for r in responses for run in r.version_runs} == {version}


@pytest.mark.parametrize("number, transport", enumerate(("cuda_ipc", "shared_memory", "file", "gloo", "cuda_ipc"), 1))
def test_pushed_weights_are_served(servers, model_dir, number, transport):
    old = load(model_dir)
    new = moved(old, number)
    ask(servers[0])  # its prefix cache holds the prompts with the weights before
    publisher = create_vllm_publisher(client_of(servers[0]), transport=transport, timeout_s=60.0)
    publisher.publish(dict(dense_parameters(new)), version=number)
    assert_serves(ask(servers[0]), new, old, number)


@pytest.mark.parametrize("number, transport", enumerate(("cuda_ipc", "shared_memory"), 6))
def test_a_sleeping_server_frees_the_gpu_and_a_push_wakes_it(servers, model_dir, number, transport):
    old = load(model_dir)
    new = moved(old, number)
    ask(servers[0])
    control = VllmControlPlane(client_of(servers[0]))
    awake = torch.cuda.mem_get_info()[0]
    control.sleep()
    freed = torch.cuda.mem_get_info()[0] - awake
    assert freed > 100 << 20, "its cache alone has 128 MB"
    publisher = create_vllm_publisher(client_of(servers[0]), transport=transport, timeout_s=60.0)
    publisher.publish(dict(dense_parameters(new)), version=number)
    assert_serves(ask(servers[0]), new, old, number)
    control.sleep()
    control.wake()
    assert_serves(ask(servers[0]), new, old, number)  # without a push: the weights were kept


def test_nccl_needs_two_gpus_and_the_server_recovers_from_the_attempt(servers, model_dir):
    old = load(model_dir)
    new = moved(old, 9)
    weights = dict(dense_parameters(new))
    by_nccl = create_vllm_publisher(client_of(servers[0]), transport="nccl", timeout_s=60.0, attempts=1)
    try:
        by_nccl.publish(weights, version=8)
    except WeightPushError as error:
        assert "Duplicate GPU" in str(error) and "use transport='cuda_ipc'" in str(error)
        create_vllm_publisher(client_of(servers[0]), transport="cuda_ipc", timeout_s=60.0).publish(weights, version=8)
    assert_serves(ask(servers[0]), new, old, 8)


def test_the_adapter_alone_is_served(servers, model_dir):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    base = load(model_dir)
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(base), config).eval()
    publisher = VllmAdapterPublisher(client_of(servers[1]), adapted, name="policy", timeout_s=60.0)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in (p for p in adapted.parameters() if p.requires_grad):
                parameter.mul_(1.5 if version == 2 else 0.5)
        publisher.publish({}, version=version)
        assert_serves(ask(servers[1], "policy"), copy.deepcopy(adapted).merge_and_unload(), base, version)
