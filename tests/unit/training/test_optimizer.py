"""Weights in bf16 learn as if they were in fp32."""

from functools import partial

import pytest
import torch

from ludic.training import CheckpointConfig
from ludic.training.learner import optimizer as optimizer_module
from ludic.training.learner.optimizer import FullPrecisionAdamW, adamw8bit
from ludic.types import ConfigError, MissingPackage
from tests.unit.training.bandit import hand_trainer, tiny_llama
from tests.unit.training.samples import random_items


def moved(dtype, make):
    """Where 200 small, consistent steps lead."""
    torch.manual_seed(0)
    start = torch.randn(64, 64).mul(0.02).to(torch.bfloat16)
    direction = torch.randn(64, 64)
    weight = torch.nn.Parameter(start.to(dtype).clone())
    optimizer = make([weight], lr=1e-5, weight_decay=0.0)
    for _ in range(200):
        weight.grad = direction.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    assert weight.grad is None
    return weight.detach().float() - start.float()


def test_small_updates_are_not_rounded_away():
    wanted = moved(torch.float32, torch.optim.AdamW)
    lost, kept = moved(torch.bfloat16, torch.optim.AdamW), moved(torch.bfloat16, FullPrecisionAdamW)
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(kept.flatten(), wanted.flatten(), dim=0) > 0.99
    assert abs(kept.norm() / wanted.norm() - 1) < 0.01
    assert abs(lost.norm() / wanted.norm() - 1) > 0.1, "if plain AdamW were as good, this file could go"


def test_fp32_weights_are_stepped_as_by_adamw():
    assert torch.equal(moved(torch.float32, FullPrecisionAdamW), moved(torch.float32, torch.optim.AdamW))


async def test_trainer_uses_fp32_copies_for_bf16_and_resumes_bit_for_bit(tmp_path):
    batches = [random_items([12, 20, 9], seed=n) for n in range(4)]
    config = CheckpointConfig(output_dir=str(tmp_path), every_n_steps=2)
    model = lambda seed=0: tiny_llama(seed).to(torch.bfloat16)  # noqa: E731
    straight = hand_trainer(*batches, model=model())
    assert isinstance(straight.optimizer, FullPrecisionAdamW)
    await straight.train()
    await hand_trainer(*batches[:2], model=model(), checkpoint_config=config).train()
    resumed = hand_trainer(*batches[2:], model=model(5), checkpoint_config=config, resume_from="latest")
    await resumed.train()
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


# --- moments in 8 bits ---


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_8_bits_lead_where_adamw_leads(dtype, bitsandbytes):
    wanted = moved(torch.float32, torch.optim.AdamW)
    found = moved(dtype, adamw8bit())
    assert torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.99
    assert abs(found.norm() / wanted.norm() - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_run_with_moments_in_8_bits_resumes_bit_for_bit(dtype, tmp_path, bitsandbytes):
    batches = [random_items([12, 20, 9], seed=n) for n in range(4)]
    config = CheckpointConfig(output_dir=str(tmp_path), every_n_steps=2)
    model = lambda seed=0: tiny_llama(seed, vocab_size=264).to(dtype)  # noqa: E731
    hand = partial(hand_trainer, cfg={"optimizer": "adamw8bit"})
    straight = hand(*batches, model=model())
    await straight.train()
    states = [state["state1"].dtype for state in straight.optimizer.state.values()]
    assert torch.uint8 in states and torch.float32 in states, "small weights keep fp32"
    await hand(*batches[:2], model=model(), checkpoint_config=config).train()
    resumed = hand(*batches[2:], model=model(5), checkpoint_config=config, resume_from="latest")
    await resumed.train()
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_missing_package_and_an_unknown_name_are_explained(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    optimizer_module.adamw8bit.cache_clear()
    with pytest.raises(MissingPackage, match="pip install 'bitsandbytes"):
        hand_trainer(random_items([12, 20]), cfg={"optimizer": "adamw8bit"})
    with pytest.raises(ConfigError, match="optimizer='sgd'; there are adamw, adamw8bit"):
        hand_trainer(random_items([12, 20]), cfg={"optimizer": "sgd"})
