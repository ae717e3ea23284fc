"""Dense weights of models with adapters equal peft's own merge, for every kind of LoRA."""

import copy

import pytest
import torch

from ludic.models.lora import adapter_problem, dense_parameters
from tests.unit.training.bandit import tiny_llama

peft = pytest.importorskip("peft", reason="the lora extra is not installed")


def trained(**settings):
    model = peft.get_peft_model(tiny_llama(attention_bias=True), peft.LoraConfig(r=4, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "lora_bias": True},
        {"target_modules": ["q_proj"], "bias": "lora_only", "lora_alpha": 32},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "use_rslora": True},
    ],
    ids=str,
)
def test_dense_parameters_equal_pefts_merge_and_leave_the_model_unchanged(settings):
    model = trained(**settings)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    dense = dict(dense_parameters(model))
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert dense.keys() == merged.keys()
    for name, parameter in merged.items():
        assert torch.allclose(dense[name], parameter, atol=1e-6), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_merged_adapter_is_not_added_again():
    model = trained(target_modules=["q_proj"])
    expected = dict(dense_parameters(model))
    model.merge_adapter()
    found = dict(dense_parameters(model))
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-6), name


def test_half_precision_weights_are_rounded_once():
    model = trained(target_modules=["q_proj"]).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # as peft keeps them
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    found = dict(dense_parameters(model))["model.layers.0.self_attn.q_proj.weight"]
    assert found.dtype is torch.bfloat16 and torch.equal(found, exact.to(torch.bfloat16))


def test_trained_embeddings_of_single_tokens_are_published():
    model = trained(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 7]})
    dense = dict(dense_parameters(model))
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert dense.keys() == merged.keys()
    assert torch.equal(dense["model.embed_tokens.weight"], merged["model.embed_tokens.weight"])


def test_a_tied_embedding_is_published_once():
    plain = tiny_llama(tie_word_embeddings=True)
    names = [name for name, _ in plain.named_parameters()]
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert [name for name, _ in dense_parameters(model)] == names


def test_adapter_problem_names_learned_prompts():
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    assert "use LoRA" in (adapter_problem(peft.get_peft_model(tiny_llama(), config)) or "")
