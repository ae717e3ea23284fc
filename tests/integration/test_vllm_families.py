"""Pushed weights of the families of docs/models.md on a real vLLM server: its answers are transformers', before and after."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_vllm_weights import (
    PROMPTS,
    assert_serves,
    greedy,
    load,
    perturbed,
    publisher_of,
    weights_of,
)
from tests.integration.vllm_fixtures import (
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
_LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16}
SIZES: dict[str, dict[str, Any]] = {
    "mistral": _HEADS,
    "mixtral": {},
    "gemma2": {**_HEADS, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "gemma3": {**_HEADS, "query_pre_attn_scalar": 32},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "gpt_oss": _HEADS,
    "deepseek_v3": {**_LATENT, "topk_method": "noaux_tc"},
    "falcon_h1": _MAMBA2,
    "glm4": _HEADS,
    "smollm3": {},
    "llama4": {**_HEADS, "intermediate_size_mlp": 128},
    "olmo3": {},
    "glm4_moe": {**_HEADS, "moe_intermediate_size": 64},
    "gemma4": {**_HEADS, "tie_word_embeddings": True, "global_head_dim": 64, "vocab_size_per_layer_input": VOCAB_SIZE},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_positions": MAX_MODEL_LEN},
    "gptj": {"n_embd": 64, "n_head": 2, "n_positions": MAX_MODEL_LEN},
    "lfm2": {},
}
"""What each family has instead of its sizes in tests/tiny_families.py."""


def save(name: str, folder: Path) -> Path:
    """A tiny model of the family with the byte tokenizer."""
    sizes = {key: value for key, value in _SIZES.items() if key not in FAMILIES[name].without}
    family_model(name, **{**sizes, **SIZES[name]}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SIZES)
def test_a_push_changes_the_answers_to_those_of_transformers(name, tmp_path):
    skip_without_vllm()
    folder = save(name, tmp_path / "model")
    process = start_warm_server(folder, tmp_path)
    try:
        server = RunningServer(process=process, model_dir=folder, run_folder=tmp_path)
        server.wait()
        model = load(folder)
        assert_serves(server, model, version=0)
        other = perturbed(model)
        assert [greedy(other, prompt) for prompt in PROMPTS] != [greedy(model, prompt) for prompt in PROMPTS]
        publisher_of(server).publish(weights_of(other), version=5)
        assert_serves(server, other, version=5)
    finally:
        process.kill()
