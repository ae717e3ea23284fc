"""Pushed weights of the families of docs/models.md on a real vLLM server: its answers are transformers', before and after.

scripts/model_table.py says "yes" for these families, and why for those that are missing here.
"""

import asyncio
import copy
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ludic.models.kinds import image_processor_of, save_tokenizer
from ludic.run.model import make_template
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest, content_of
from ludic_envs.picture_grid import draw_grid
from ludic_gpu.tiny_vision import tiny_vision
from ludic_gpu.vision import Pictures
from ludic_vllm.command import find_vllm
from plugins.vllm.tests.test_vllm_weights import (
    ask,
    assert_serves,
    client_of,
    load,
    logprobs,
    perturbed,
    publisher_of,
    weights_of,
)
from plugins.vllm.tests.vllm_fixtures import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    RunningServer,
    byte_tokenizer,
    skip_without_vllm,
    start_warm_server,
)
from tests.tiny_families import FAMILIES, family_model

pytestmark = pytest.mark.integration

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
_HEADS = {"head_dim": 32}
"""The least of vLLM's kernels on a CPU."""
_SPREAD = {"initializer_range": 0.1}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": MAX_MODEL_LEN // 4,
         "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {**_SPREAD, "tie_word_embeddings": True},
    "qwen3": {**_HEADS, **_SPREAD, "tie_word_embeddings": True},
    "mistral": _HEADS,
    "mixtral": {},
    "gemma2": {**_HEADS, "tie_word_embeddings": True, "initializer_range": 0.1, "query_pre_attn_scalar": 32},
    "gemma3": {**_HEADS, "query_pre_attn_scalar": 32},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "falcon_h1": _MAMBA2,
    "glm4": _HEADS,
    "smollm3": {},
    "olmo3": {},
    "glm4_moe": {**_HEADS, "moe_intermediate_size": 64},
    "gemma4": {
        **_HEADS,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gpt2": {"n_embd": 64, "n_head": 2, "n_positions": MAX_MODEL_LEN},
    "gptj": {"n_embd": 64, "n_head": 2, "n_positions": MAX_MODEL_LEN},
    "granite_moe_hybrid": {k: v for k, v in _MAMBA2.items() if k != "mamba_d_ssm"},
    "llama4": {**_HEADS, **_SPREAD, "intermediate_size_mlp": 128, "attention_chunk_size": 256, "floor_scale": 8192},
    "gpt_oss": {**_SPREAD, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131_072},
    "zamba2": {**_SPREAD, "num_key_value_heads": 2, "mamba_d_state": 16, "n_mamba_heads": 4, "mamba_headdim": 32},
    # vLLM reads the router's kind from published configs, which transformers does not write; its latent attention has one size
    "deepseek_v3": {
        **_SPREAD, "num_key_value_heads": 2, "moe_intermediate_size": 64, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "rope_parameters": _YARN,
    },
    # one head: vLLM 0.32 on a CPU rotates only the first
    "lfm2": {
        **_SPREAD, "tie_word_embeddings": True, "num_attention_heads": 1, "conv_dim": 64, "conv_dim_out": 64, "block_dim": 64,
        "block_ff_dim": 128,
    },
    "qwen3_next": {
        **_SPREAD, "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
"""What each family has instead of its sizes in tests/tiny_families.py."""
FLAGS = {"qwen3_next": ["--dtype", "bfloat16"]}
"""vLLM's gated delta nets compute in bf16 only on a CPU."""


def save(name: str, folder: Path) -> Path:
    """A tiny model of the family with the byte tokenizer."""
    sizes = {key: value for key, value in _SIZES.items() if key not in FAMILIES[name].without}
    family_model(name, **{**sizes, **SIZES[name]}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.extended(
    covered_by="plugins/vllm/tests/test_vllm_weights.py::test_a_push_changes_the_experts_of_a_mixture"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_push_changes_the_answers_to_those_of_transformers(name, tmp_path):
    skip_without_vllm()
    folder = save(name, tmp_path / "model")
    flags = FLAGS.get(name, [])
    check = assert_serves_rounded if "bfloat16" in flags else assert_serves
    process = start_warm_server(folder, tmp_path, *flags)
    try:
        server = RunningServer(process=process, model_dir=folder, run_folder=tmp_path)
        server.wait()
        model = load(folder)
        check(server, model, version=0)
        other = perturbed(model)
        answer = ask(server)[1]
        assert np.abs(logprobs(model, answer) - logprobs(other, answer)).max() > 0.01, "the push would not be seen"
        publisher_of(server).publish(weights_of(other), version=5)
        check(server, other, version=5)
    finally:
        process.kill()


def assert_serves_rounded(server: Any, model: Any, version: int) -> None:
    """The log-probs are those of `model` as far as a server that computes in bf16 can tell, and not those of a moved one."""
    answers = ask(server)

    def distance(other: Any) -> float:
        return float(np.mean([np.abs(r.completion_logprobs - logprobs(other, r)).mean() for r in answers]))

    rounded = copy.deepcopy(model).bfloat16()
    rounding = np.mean([np.abs(logprobs(rounded, r) - logprobs(model, r)).mean() for r in answers])
    assert distance(model) < 4 * rounding
    assert distance(perturbed(model, seed=2)) > 10 * rounding
    assert {run.version for r in answers for run in r.version_runs} == {version}


def _answers(server: RunningServer, prompts: list[Any]) -> list[Any]:
    async def ask_all() -> list[Any]:
        client = client_of(server)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        requests = [
            TokenCompletionRequest(
                "tiny", prompt.prompt_token_ids, images=prompt.images, sampling=params, return_=ReturnSpec.for_rl()
            )
            for prompt in prompts
        ]
        return [response for response, _ in await asyncio.gather(*map(client.complete_tokens, requests))]

    return asyncio.run(ask_all())


@torch.no_grad()
def _assert_sees(answer: Any, prompt: Any, model: Any, pictures: Pictures) -> None:
    """The greedy tokens and their log-probs are those of transformers' own forward pass with the picture."""
    written = torch.from_numpy(answer.completion_token_ids.astype(np.int64))
    ids = torch.cat([torch.from_numpy(prompt.prompt_token_ids.astype(np.int64)), written])[None]
    patches, grid_3 = pictures.pixels(prompt.images[0].image)
    kinds = (ids == model.config.image_token_id).int()
    out = model(input_ids=ids, mm_token_type_ids=kinds, pixel_values=patches, image_grid_thw=grid_3[None])
    logps_NV = out.logits[0, len(prompt.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert logps_NV.argmax(-1).tolist() == written.tolist()
    np.testing.assert_allclose(answer.completion_logprobs, logps_NV.gather(-1, written[:, None])[:, 0], atol=1e-3)


def skip_without_pictures() -> None:
    """`make vllm` installs vLLM without the two packages that its processor of pictures imports."""
    skip_without_vllm()
    found = subprocess.run([find_vllm().python, "-c", "import torchvision, blake3"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("vLLM's environment cannot import torchvision and blake3, which it needs for pictures")


@pytest.mark.extended(
    covered_by="plugins/gpu/tests/test_vision.py::test_a_vllm_worker_expects_the_weights_that_the_trainer_has"
)
@pytest.mark.slow
def test_a_push_changes_the_answers_about_pictures(tmp_path):
    pytest.importorskip("PIL", reason="the vision extra is not installed")
    skip_without_pictures()
    made = tiny_vision(width=128, seed=3)
    made.model.save_pretrained(tmp_path / "model")
    save_tokenizer(made.tokenizer, tmp_path / "model")
    template, pictures = make_template(made.tokenizer), Pictures(image_processor_of(made.tokenizer))
    prompts = [
        template.apply([{"role": "user", "content": content_of("Which?", draw_grid(3, 8, cell))}]) for cell in (0, 4, 8)
    ]
    process = start_warm_server(tmp_path / "model", tmp_path)
    try:
        server = RunningServer(process=process, model_dir=tmp_path / "model", run_folder=tmp_path)
        server.wait()
        first = _answers(server, prompts)
        assert len({tuple(answer.completion_token_ids.tolist()) for answer in first}) > 1, "no picture was looked at"
        other = perturbed(made.model)
        publisher_of(server).publish(weights_of(other), version=5)
        for model, answers in ((made.model, first), (other, _answers(server, prompts))):
            for prompt, answer in zip(prompts, answers, strict=True):
                _assert_sees(answer, prompt, model, pictures)
    finally:
        process.kill()
