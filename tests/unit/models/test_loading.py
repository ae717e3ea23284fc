from pathlib import Path

import pytest
import torch

from ludic.inference import HFChatTemplate
from ludic.models.loading import load_model
from ludic.types import ConfigError

TINY = Path(__file__).parents[3] / "examples" / "tic_tac_toe" / "tiny" / "config.json"


def weights(seed: int) -> torch.Tensor:
    return load_model(TINY, device="cpu", seed=seed).model.get_input_embeddings().weight.detach()


def test_a_config_gives_random_weights_that_depend_on_the_seed_alone():
    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


def test_making_a_model_keeps_the_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights(0)
    assert torch.equal(torch.rand(3), expected)


def test_the_tokenizer_beside_the_config_can_chat():
    loaded = load_model(TINY, device="cpu")
    ids = HFChatTemplate(loaded.tokenizer).apply([{"role": "user", "content": "X A1 A2=O"}]).prompt_token_ids
    assert loaded.tokenizer.decode(ids) == "<|user|> X A1 A2=O <|end|> <|assistant|>"
    assert loaded.tokenizer.unk_token_id not in ids


def test_a_config_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot make a model from .*nowhere/config.json"):
        load_model(tmp_path / "nowhere" / "config.json")


def test_tiny_is_a_name_that_needs_no_file(tmp_path):
    loaded, again, other = (load_model("tiny", device="cpu", seed=seed) for seed in (0, 0, 1))
    first, same, different = (one.model.get_input_embeddings().weight for one in (loaded, again, other))
    assert torch.equal(first, same) and not torch.equal(first, different)
    assert loaded.name == "tiny" and first.dtype is torch.float32 and not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hi!")) == "Hi!"
    assert load_model("tiny", device="cpu", dtype=torch.bfloat16).model.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="'smollm2-135m' or 'tiny'"):
        load_model(str(tmp_path / "tiny_model"))
