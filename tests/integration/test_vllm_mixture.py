"""The weights of a mixture on a real vLLM server: what it answers after a push is what transformers computes."""

import pytest

from tests.integration.test_vllm_weights import assert_serves, load, perturbed, publisher_of, weights_of
from tests.integration.vllm_fixtures import (
    RunningServer,
    save_tiny_model,
    skip_without_vllm,
    start_warm_server,
    tiny_config,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]


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
