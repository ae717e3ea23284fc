"""A base in four bits: it trains an adapter, samples, and gives servers the dense weights that it computes with."""

import copy
import sys

import pytest
import torch

from ludic.models.kinds import is_quantized
from ludic.models.lora import dense_parameters
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy
from ludic.types import ConfigError, MissingPackage
from ludic_gpu.quantized import quantize_linears
from tests.unit.training.bandit import hand_trainer, tiny_llama
from tests.unit.training.samples import random_items

CPU = torch.device("cpu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    with pytest.raises(MissingPackage, match="quantize_base='4bit' needs the package 'bitsandbytes'"):
        load_policy(ModelSettings(model="tiny", lora_rank=2, quantize_base="4bit", device="cpu"))


def test_only_the_base_of_an_adapter_is_quantised():
    with pytest.raises(ConfigError, match="Give --lora-rank"):
        ModelSettings(quantize_base="4bit")


@pytest.fixture
def installed():
    pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
    pytest.importorskip("peft", reason="the lora extra is not installed")


def policy():
    import peft

    base = quantize_linears(tiny_llama(hidden_size=64, intermediate_size=128), CPU)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_the_linear_layers_take_half_a_byte_per_weight(installed):
    plain = tiny_llama(hidden_size=64, intermediate_size=128)
    model = quantize_linears(copy.deepcopy(plain), CPU)
    up, other = model.model.layers[0].mlp.up_proj, plain.model.layers[0].mlp.up_proj
    assert up.weight.nbytes * 2 == other.weight.numel()
    assert not is_quantized(model.lm_head) and not any(p.requires_grad for p in model.parameters())
    x = torch.randn(7, 64)
    assert float((up(x) - other(x)).norm() / other(x).norm()) < 0.2, "four bits round"


def test_servers_get_the_weights_that_the_policy_computes_with(installed):
    model = policy()
    dense = tiny_llama(hidden_size=64, intermediate_size=128)
    weights = dict(dense_parameters(model))
    assert weights.keys() == dict(dense.named_parameters()).keys()
    dense.load_state_dict(weights)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


async def test_an_adapter_learns_and_the_base_stays(installed):
    model = policy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    await hand_trainer(*[random_items([12, 20, 9])] * 2, model=model, cfg={"gradient_checkpointing": True}).train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)
