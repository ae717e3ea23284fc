"""Where shapes come from, and what is refused."""

import json

import pytest

from ludic.types import ConfigError
from ludic_ops.scaling import read_shape

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_config_file_and_its_folder_give_the_same_shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3))
    shape = read_shape(path)
    assert shape == read_shape(tmp_path) and shape.name == tmp_path.name
    assert shape.q_width == 2048 and shape.kv_width == 1024 and shape.head_norms
    assert shape.params == 596_049_920  # Qwen3-0.6B


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds list"),
        (json.dumps({**QWEN3, "model_type": "mixtral"}), "of type 'mixtral'.*qwen3"),
        (json.dumps({"model_type": "llama", "hidden_size": 8}), "lacks intermediate_size"),
        (json.dumps({**QWEN3, "num_hidden_layers": 0}), "layers=0"),
        (json.dumps({**QWEN3, "vocab_size": None}), "vocab=None"),
    ],
)
def test_a_config_that_says_nothing_useful_is_refused(tmp_path, contents, message):
    path = tmp_path / "config.json"
    path.write_text(contents)
    with pytest.raises(ConfigError, match=message):
        read_shape(path)


def test_an_unknown_name_suggests_a_known_one():
    with pytest.raises(ConfigError, match="Did you mean '32b'"):
        read_shape("32bb")
