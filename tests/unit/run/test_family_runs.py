"""One update of `ludic train --model FOLDER` for every family of docs/models.md: loading, sampling, training, the checkpoint."""

import math

import pytest
import torch

from ludic.models.loading import character_tokenizer
from ludic.run import build
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy
from tests.extended import cases
from tests.tiny_families import FAMILIES, family_model
from tests.unit.run.test_run import Letter

pytestmark = pytest.mark.slow

ONE_OF_EACH_KIND = ["llama", "qwen3_moe", "falcon_h1"]
"""Dense, with experts, recurrent."""


@pytest.mark.parametrize("name", cases(FAMILIES, default=ONE_OF_EACH_KIND))
@pytest.mark.slow
def test_one_update_moves_weights_and_the_checkpoint_has_them(name, tmp_path):
    assert one_update(name, tmp_path, "float32") < 1e-4, "sampler and trainer compute the same"


@pytest.mark.slow
def test_one_update_in_bf16(tmp_path):
    """The default on a processor that computes in it."""
    assert one_update("llama", tmp_path, "bfloat16") < 0.05, "sampler and trainer round differently"


def one_update(name, tmp_path, dtype):
    """The mean difference between the log-probs of sampler and trainer."""
    model, folder, tokenizer = family_model(name), tmp_path / "model", character_tokenizer()
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = {"max_tokens": 2, "group_size": 4, "rollouts_per_update": 8, "lr": 1e-2, "entropy_bonus": 0.1}
    settings = {
        **given,
        "device": "cpu",
        "dtype": dtype,
        "logger": "none",
        "system_prompt": None,
        "checkpoint_every": 1,
    }
    with build(env=Letter, model=str(folder), runs=tmp_path, name="run", steps=1, **settings) as run:
        result = run.train()
    assert result.step == 1 and math.isfinite(result.stats["train/loss"])
    before, after = (load_policy(ModelSettings(model=str(place), device="cpu")).model for place in (folder, run.folder))
    pairs = list(zip(before.named_parameters(), after.parameters(), strict=True))
    assert all(bool(weight.isfinite().all()) for _, weight in pairs)
    assert any(not torch.equal(old, new) for (_, old), new in pairs)
    return result.stats["train/logp_difference_abs"]
