"""Loading models by path and name, and the tiny random models."""

from pathlib import Path

import pytest
import torch

from ludic.inference import HFChatTemplate
from ludic.models.loading import load_model
from ludic.models.tiny import character_tokenizer, tiny_llama, word_tokenizer
from ludic.types import ConfigError
from tests.tiny_families import family_model

TINY = Path(__file__).parents[3] / "examples" / "tic_tac_toe" / "tiny" / "config.json"


def weights(seed: int) -> torch.Tensor:
    return load_model(TINY, device="cpu", seed=seed).model.get_input_embeddings().weight.detach()


def test_weights_from_a_config_depend_on_the_seed_only():
    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


def test_loading_from_a_config_keeps_the_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights(0)
    assert torch.equal(torch.rand(3), expected)


def test_tokenizer_beside_the_config_is_loaded_with_its_chat_template():
    loaded = load_model(TINY, device="cpu")
    ids = HFChatTemplate(loaded.tokenizer).apply([{"role": "user", "content": "X A1 A2=O"}]).prompt_token_ids
    assert loaded.tokenizer.decode(ids) == "<|user|> X A1 A2=O <|end|> <|assistant|>"
    assert loaded.tokenizer.unk_token_id not in ids


def test_error_names_a_missing_config(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot make a model from .*nowhere/config.json"):
        load_model(tmp_path / "nowhere" / "config.json")


def test_tiny_loads_without_a_file(tmp_path):
    loaded, again, other = (load_model("tiny", device="cpu", seed=seed) for seed in (0, 0, 1))
    first, same, different = (one.model.get_input_embeddings().weight for one in (loaded, again, other))
    assert torch.equal(first, same) and not torch.equal(first, different)
    assert loaded.name == "tiny" and first.dtype is torch.float32 and not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hi!")) == "Hi!"
    assert load_model("tiny", device="cpu", dtype=torch.bfloat16).model.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="'smollm2-135m' or 'tiny'"):
        load_model(str(tmp_path / "tiny_model"))


def test_word_tokenizer_has_one_token_per_word():
    tokenizer = word_tokenizer(["A1", "B2", "X"])
    ids = tokenizer.encode("X A1 B2")
    assert len(ids) == 3 and tokenizer.decode(ids) == "X A1 B2"
    assert tokenizer.encode("what") == [tokenizer.unk_token_id]


def test_word_tokenizer_template_continues_token_by_token():
    template = HFChatTemplate(word_tokenizer(["A1", "B2", "X"]))
    opening = [{"role": "user", "content": "X A1"}]
    prompt = template.apply(opening).prompt_token_ids.tolist()
    reply = [template.tokenizer.convert_tokens_to_ids("B2"), template.tokenizer.eos_token_id]
    messages = [*opening, {"role": "assistant", "content": "B2"}, {"role": "user", "content": "X B2"}]
    delta = template.delta(messages, num_sent=1, completion_token_ids=reply).tolist()
    assert prompt + reply + delta == template.apply(messages).prompt_token_ids.tolist()


def test_tiny_llama_depends_on_its_seed_and_keeps_the_global_random_state():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = tiny_llama(32), tiny_llama(32), tiny_llama(32, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def tiny_falcon():
    """It reads the dropout of its config in every pass."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, hidden_dropout=0.3, attention_dropout=0.3))


@pytest.mark.parametrize("make", [lambda: family_model("gpt2"), tiny_falcon], ids=["gpt2", "falcon"])
def test_a_loaded_model_computes_the_same_in_training_mode(make, tmp_path):
    model = make()
    ids = torch.arange(9)[None]
    assert not torch.equal(model.train()(ids).logits, model.eval()(ids).logits), "it has dropout"
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        loaded = load_model(source, device="cpu", dtype=torch.float32).model
        assert torch.equal(loaded.train()(ids).logits, loaded.eval()(ids).logits)
