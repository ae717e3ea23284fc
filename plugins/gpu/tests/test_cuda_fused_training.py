"""The fused training pass on a GPU: its kernels and flash attention, against transformers' own modules and fp32."""

import copy

import pytest
import torch

from ludic.models.head import hidden_states
from ludic.models.packed_attention import PackedSequences, TreeSequences
from ludic.models.passes.routing import route_attention
from ludic.models.prefix_tree import TokenTree
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import CISPOLoss
from ludic_gpu.llama.training import FusedDecoder, fused_decoder
from tests.unit.inference.local.tiny_models import new_model, some_prompt
from tests.unit.training.samples import random_items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ["llama", "llama-mha-tied", "qwen2", "qwen3", "mistral-sliding"]
LENGTHS = [5, 9, 1, 130, 17, 300]
WIDE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def trainable(family="llama", dtype=torch.bfloat16, **overrides):
    sizes = {**WIDE, "max_position_embeddings": 512, "initializer_range": 0.05, **overrides}
    if family == "llama-mha-tied":
        sizes["num_key_value_heads"] = 6
    model = new_model(family, **sizes).to("cuda", dtype).requires_grad_(True).train()
    route_attention(model)
    return model


def inputs(lengths=LENGTHS):
    ids_T = torch.tensor([token for i, n in enumerate(lengths) for token in some_prompt(n, seed=i)])
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    return ids_T.cuda(), positions_T.cuda(), PackedSequences(lengths, torch.device("cuda"))


def through(model, hidden_TN):
    """(hidden states, gradient of each parameter)."""
    model.zero_grad()
    slope = torch.randn(hidden_TN.shape, generator=torch.Generator().manual_seed(0)).to(hidden_TN)
    hidden_TN.backward(slope)
    grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden_TN.detach().float(), **grads}


def of_modules(model, *call):
    return through(model, hidden_states(model, *call))


def of_fused(model, *call):
    return through(model, FusedDecoder(model).hidden(*call))


def errors(found, truth):
    assert found.keys() == truth.keys()
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in truth.items()}


def assert_as_good(found, modules, truth):
    """Against fp32, no worse than the modules in half precision but for the luck of rounding."""
    ours, theirs = errors(found, truth), errors(modules, truth)
    mean = sum(theirs.values()) / len(theirs)
    assert sum(ours.values()) / len(ours) <= 1.2 * mean
    worse = {name: (ours[name], theirs[name]) for name in ours if ours[name] > 1.5 * max(theirs[name], mean)}
    assert not worse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_as_good_as_those_of_the_modules(family, dtype):
    model = trainable(family, dtype)
    truth = of_modules(copy.deepcopy(model).float(), *inputs())
    assert_as_good(of_fused(model, *inputs()), of_modules(model, *inputs()), truth)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_adapters_are_as_good_as_those_of_the_modules(family):
    """peft keeps adapters in fp32 and computes with them in fp32, the fused pass in half precision: so is the model to compare."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(trainable(family), settings, autocast_adapter_dtype=False).train()
    route_attention(adapted.get_base_model())
    model = adapted.get_base_model()
    truth = of_modules(copy.deepcopy(model).float(), *inputs())
    assert_as_good(of_fused(model, *inputs()), of_modules(model, *inputs()), truth)
    assert fused_decoder(peft.get_peft_model(trainable(family), settings).train()) is not None


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
        {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "head_dim": 128},
        {"hidden_size": 200, "intermediate_size": 1000, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 40},
    ],
    ids=["135m", "1.5b", "odd"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shapes_of_real_models_and_odd_ones(family, sizes):
    model = trainable(family, **sizes)
    truth = of_modules(copy.deepcopy(model).float(), *inputs())
    assert_as_good(of_fused(model, *inputs()), of_modules(model, *inputs()), truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_gradients(family):
    model = trainable(family)
    expected = of_fused(model, *inputs())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = of_fused(model, *inputs())
    assert torch.equal(found["hidden"], expected["hidden"])
    assert max(errors(found, expected).values()) < 0.01  # flash attention's gradient of queries adds up in any order


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
def test_samples_can_share_their_prefix(family, merges):
    model = trainable(family)
    prompt = some_prompt(60)
    tree = TokenTree.of([torch.tensor(prompt + some_prompt(n, seed=n)).numpy() for n in (30, 7, 100)])
    assert tree.num_tokens <= 60 + 30 + 7 + 100
    call = torch.from_numpy(tree.ids_T).cuda(), torch.from_numpy(tree.positions_T).cuda()
    state = TreeSequences(tree, torch.device("cuda"), merges=merges)
    truth = of_modules(copy.deepcopy(model).float(), *call, TreeSequences(tree, torch.device("cuda")))
    assert_as_good(of_fused(model, *call, state), of_modules(model, *call, state), truth)


@pytest.mark.parametrize("frozen", ["k_proj", "up_proj", "layernorm", "_norm", "layers.0", "embed"])
def test_frozen_parameters_get_no_gradient(frozen):
    model = trainable("qwen3")
    expected = of_fused(model, *inputs())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    kept = {name: grad for name, grad in expected.items() if frozen not in name}
    assert max(errors(of_fused(model, *inputs()), kept).values()) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_uses_it_and_micro_batches_add_up(family):
    items = random_items([5, 9, 9, 17, 30, 2, 12, 7])

    def gradients(model, budget, **settings):
        policy = TrainedPolicy(model, mixed_precision_dtype=None, **settings)
        model.zero_grad()
        accumulate_gradients(policy, CISPOLoss(), items, micro_token_budget=budget)
        return policy.is_fused, {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}

    model = trainable(family)
    is_fused, truth = gradients(copy.deepcopy(model).float(), 1000)
    assert not is_fused
    for budget in (1000, 40):
        is_fused, found = gradients(model, budget)
        assert is_fused
        assert_as_good(found, gradients(model, budget, fused=False)[1], truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_passes_give_the_same(family):
    model = trainable(family)
    fused = FusedDecoder(model)
    for number, lengths in enumerate([LENGTHS, LENGTHS[::-1], [400, 3, 3, 20, 1]]):  # one shape after rounding
        hidden_TN = fused.hidden(*inputs(lengths))
        assert (hidden_TN.grad_fn.held is None) == (number == 0)
        found, expected = through(model, hidden_TN), of_fused(model, *inputs(lengths))
        assert max(errors(found, expected).values()) < 0.02


def test_a_captured_pass_sees_updated_weights():
    model = trainable()
    fused = FusedDecoder(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        found = through(model, fused.hidden(*inputs()))
        assert max(errors(found, of_fused(model, *inputs())).values()) < 0.02
        optimizer.step()


def test_other_models_run_through_their_modules():
    for family in ("gemma2-softcap", "phi-output-bias"):
        model = new_model(family, hidden_size=64, head_dim=16).to("cuda", torch.bfloat16).requires_grad_(True)
        assert not TrainedPolicy(model).is_fused
    assert fused_decoder(trainable(dtype=torch.float32)) is None
    hooked = trainable()
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert fused_decoder(hooked) is None


def test_a_hook_that_comes_later_is_called():
    model, calls = trainable(), []
    policy = TrainedPolicy(model)
    items = random_items([5, 9])
    with torch.no_grad():
        fused = policy.logps(policy.batch(items))[0]
        model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
        plain = policy.logps(policy.batch(items))[0]
    assert calls
    torch.testing.assert_close(fused, plain, rtol=0.05, atol=0.05)
