"""The fused training pass of the Llama family gives the values and gradients of transformers' own modules.

Here in fp32 with the functions of plain.py; plugins/gpu/tests/test_cuda_fused_training.py runs the kernels.
"""

import gc
import weakref

import numpy as np
import pytest
import torch

from ludic.models import packed_attention
from ludic.models.adapters import AdapterBank, AdapterSpec, LoraAdapter
from ludic.models.head import hidden_states
from ludic.models.packed_attention import PackedSequences, TreeSequences
from ludic.models.passes.routing import route_attention
from ludic.models.prefix_tree import TokenTree
from ludic_gpu.llama import graphs, training
from ludic_gpu.llama.adapters import has_plain_layers
from ludic_gpu.llama.training import FusedDecoder, agrees, fused_decoder
from tests.extended import cases
from tests.unit.inference.local.tiny_models import new_model, some_prompt
from tests.unit.models.test_prefix_tree import VarlenReference

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft", reason="the lora extra is not installed")
FAMILIES = ["llama", "llama-mha-tied", "qwen2", "qwen3", "mistral-sliding"]
LENGTHS = [5, 9, 1, 9, 17]
CPU = torch.device("cpu")


def trainable(family="llama", **overrides):
    model = new_model(family, **{"initializer_range": 0.1, **overrides}).requires_grad_(True).train()
    route_attention(model)
    return model


def inputs(lengths=LENGTHS):
    ids_T = torch.tensor([token for i, n in enumerate(lengths) for token in some_prompt(n, seed=i)])
    return ids_T, torch.cat([torch.arange(n) for n in lengths]), PackedSequences(lengths, CPU)


def slope_of(hidden_TN):
    return torch.randn(hidden_TN.shape, generator=torch.Generator().manual_seed(0))


def of_modules(model, *call):
    """(hidden states, gradient of each parameter)."""
    return through(model, hidden_states(model, *call))


def of_fused(model, *call):
    return through(model, FusedDecoder(model).hidden(*call))


def through(model, hidden_TN):
    model.zero_grad()
    hidden_TN.backward(slope_of(hidden_TN))
    return hidden_TN.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_modules(family):
    model = trainable(family)
    assert_equal(of_fused(model, *inputs()), of_modules(model, *inputs()))


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_gradients(family):
    model = trainable(family)
    expected = of_fused(model, *inputs())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = of_fused(model, *inputs())
    assert torch.equal(found[0], expected[0])
    for name, grad in expected[1].items():
        assert torch.equal(found[1][name], grad), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("frozen", ["q_proj", "v_proj", "up_proj", "o_proj", "layernorm", "_norm", "layers.0", "embed"])
def test_frozen_parameters_get_no_gradient_and_leave_the_others_alone(family, frozen):
    model = trainable(family)
    expected = of_modules(model, *inputs())[1]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    kept = {name: grad for name, grad in expected.items() if frozen not in name}
    found = of_fused(model, *inputs())
    assert_equal(found, (found[0], kept))


# --- LoRA ---


def with_adapters(family="qwen2", **settings):
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    adapted = peft.get_peft_model(trainable(family), peft.LoraConfig(**settings)).train()
    route_attention(adapted.get_base_model())
    return adapted


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_have_the_values_and_gradients_of_the_modules(family):
    model = with_adapters(family).get_base_model()
    found, expected = of_fused(model, *inputs()), of_modules(model, *inputs())
    assert expected[1] and all(".lora_" in name for name in expected[1])
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["v_proj"], "layers_to_transform": [1]},
        {"lora_alpha": 3, "use_rslora": True, "rank_pattern": {"up_proj": 2}},
    ],
    ids=["some projections", "one layer", "other scales and ranks"],
)
def test_adapters_on_some_layers_with_other_scales_and_ranks(settings):
    model = with_adapters(**settings).get_base_model()
    assert_equal(of_fused(model, *inputs()), of_modules(model, *inputs()))


def test_adapters_and_recomputed_layers():
    model = with_adapters().get_base_model()
    expected = of_fused(model, *inputs())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(of_fused(model, *inputs()), expected)


def test_disabled_adapters_give_the_base_model():
    adapted = with_adapters()
    fused = FusedDecoder(adapted.get_base_model())
    with adapted.disable_adapter(), torch.no_grad():
        expected = hidden_states(adapted, *inputs())
        found = fused.hidden(*inputs())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert fused.is_current
    with torch.no_grad():
        assert not torch.allclose(fused.hidden(*inputs()), expected, atol=1e-2)


def test_adapters_of_higher_precision_than_the_model_get_gradients_of_theirs():
    model = with_adapters().get_base_model()
    expected = of_fused(model, *inputs())
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.double()
    found = of_fused(model, *inputs())
    assert found[0].dtype is torch.float32
    assert all(grad.dtype is torch.float64 for grad in found[1].values())
    assert_equal((found[0], {name: grad.float() for name, grad in found[1].items()}), expected)


@pytest.mark.parametrize("change", ["merge", "other adapter", "new adapter beside it"])
def test_a_changed_adapter_is_noticed(change):
    adapted = with_adapters()
    fused = FusedDecoder(adapted.get_base_model())
    assert fused.is_current
    if change == "merge":
        adapted.merge_adapter()
    else:
        adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear"))
        adapted.base_model.set_adapter("other" if change == "other adapter" else ["default", "other"])
    assert not fused.is_current


@pytest.mark.parametrize(
    "settings", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}], ids=["dropout", "DoRA", "bias"]
)
def test_other_kinds_of_adapters_run_through_their_own_modules(settings):
    assert has_plain_layers(with_adapters().get_base_model())
    assert not has_plain_layers(with_adapters(**settings).get_base_model())


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_a_bank_have_the_values_and_gradients_of_its_modules(family):
    model = trainable(family)
    bank = AdapterBank(model)
    route_attention(bank.model)
    specs = [AdapterSpec(rank=4, seed=1), AdapterSpec(rank=2, seed=2, alpha=3.0, mlp=False)]
    adapters = [LoraAdapter.create(model, spec) for spec in specs]
    for number, adapter in enumerate(adapters):
        adapter.flat.copy_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    spans = [(adapters[0], 5), (None, 9), (adapters[1], 10), (adapters[0], 17)]
    found = []
    for decoder in (FusedDecoder(bank.model), None):
        with bank.using(spans):
            hidden_TN = hidden_states(bank.model, *inputs()) if decoder is None else decoder.hidden(*inputs())
        hidden_TN.backward(slope_of(hidden_TN))
        trained = [p for adapter in adapters for p in adapter.parameters()]
        found.append((hidden_TN.detach(), {str(n): p.grad for n, p in enumerate(trained) if p.grad is not None}))
        for parameter in trained:
            parameter.grad = None
    assert len(found[0][1]) == 2 * 2 * (7 + 4)  # two layers, A and B; not the output layer
    assert_equal(*found)
    assert has_plain_layers(bank.model)


def test_micro_batches_add_up():
    model = trainable("qwen2")
    whole = of_modules(model, *inputs([5, 9]))[1]
    fused, slope = FusedDecoder(model), slope_of(torch.empty(14, model.config.hidden_size))
    model.zero_grad()
    ids_T, positions_T, _ = inputs([5, 9])
    for part in (slice(0, 5), slice(5, 14)):
        state = PackedSequences([part.stop - part.start], CPU)
        fused.hidden(ids_T[part], positions_T[part], state).backward(slope[part])
    for name, grad in whole.items():
        found = model.get_parameter(name).grad
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()), msg=name)


def shared_tree():
    tree = TokenTree.of([torch.tensor(some_prompt(6) + some_prompt(n, seed=n)).numpy() for n in (3, 7, 4)], 1)
    assert tree.num_tokens <= 6 + 3 + 7 + 4
    return tree


def attend_as_on_a_gpu(monkeypatch):
    """By the calls of a GPU, and a reference of their kernels."""
    monkeypatch.setattr(packed_attention, "aten", VarlenReference())
    monkeypatch.setattr(training, "_has_flash", lambda x: True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calls_of_a_gpu_give_the_same(family, monkeypatch):
    model = trainable(family)
    expected = of_modules(model, *inputs())
    attend_as_on_a_gpu(monkeypatch)
    assert_equal(of_fused(model, *inputs()), expected)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
def test_samples_can_share_their_prefix_on_a_gpu(family, merges, monkeypatch):
    model, tree = trainable(family), shared_tree()
    call = torch.from_numpy(tree.ids_T), torch.from_numpy(tree.positions_T)
    expected = of_modules(model, *call, TreeSequences(tree, CPU))
    attend_as_on_a_gpu(monkeypatch)
    assert_equal(of_fused(model, *call, TreeSequences(tree, CPU, merges=merges)), expected)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_samples_can_share_their_prefix(family):
    model = trainable(family)
    tree = shared_tree()
    call = torch.from_numpy(tree.ids_T), torch.from_numpy(tree.positions_T), TreeSequences(tree, CPU)
    assert_equal(of_fused(model, *call), of_modules(model, *call))


def test_without_gradients_nothing_is_stored():
    model = trainable()
    with torch.no_grad():
        hidden_TN = FusedDecoder(model).hidden(*inputs())
    assert hidden_TN.grad_fn is None
    assert torch.equal(hidden_TN, FusedDecoder(model).hidden(*inputs()).detach())


def test_a_second_backward_pass_is_refused():
    hidden_TN = FusedDecoder(trainable()).hidden(*inputs())
    hidden_TN.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run once"):
        hidden_TN.sum().backward()


def test_nothing_keeps_a_finished_pass_alive():
    gc.disable()
    try:
        hidden_TN = FusedDecoder(trainable()).hidden(*inputs())
        stored = hidden_TN.grad_fn.tape[0][2]
        kept = [weakref.ref(hidden_TN.grad_fn), weakref.ref(stored), weakref.ref(stored.gate_up_TE)]
        del hidden_TN, stored
        assert [reference() for reference in kept] == [None] * 3
    finally:
        gc.enable()


def record_in_python(work, memory):
    """A stand-in for a CUDA graph: runs the work again and puts the results where they lay."""
    results = work()

    def overwrite(old, new):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
        elif isinstance(old, list):
            old[:] = new
        else:
            for a, b in zip(old, new, strict=True):
                overwrite(a, b)

    return (lambda: overwrite(results, work())), results


@pytest.fixture
def recorded(monkeypatch):
    """Passes are captured; the fixture counts how many."""
    found = []

    def record(work, memory):
        found.append(work)
        return record_in_python(work, memory)

    attend_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(graphs, "_warm_up", lambda work: work())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return found


@pytest.mark.parametrize("family", cases(FAMILIES, default=["llama", "qwen3"]))
def test_captured_passes_give_the_same(family, recorded):
    model = trainable(family)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    fused = FusedDecoder(model)
    for number, lengths in enumerate([LENGTHS, LENGTHS[::-1], [16, 3, 3, 4, 1]]):  # one shape after rounding
        found = through(model, fused.hidden(*inputs(lengths)))
        assert len(recorded) == (0 if number == 0 else 2)
        assert_equal(found, through(model, FusedDecoder(model).hidden(*inputs(lengths))))


def test_captured_micro_batches_add_up(recorded):
    model = trainable()
    fused = FusedDecoder(model)
    for _ in range(2):
        single = through(model, fused.hidden(*inputs()))[1]
    model.zero_grad()
    for _ in range(3):
        hidden_TN = fused.hidden(*inputs())
        hidden_TN.backward(slope_of(hidden_TN))
    assert len(recorded) == 2
    for name, grad in single.items():
        torch.testing.assert_close(model.get_parameter(name).grad, 3 * grad, msg=name)


def test_a_pass_between_forward_and_backward_of_another_is_not_captured(recorded):
    model = trainable()
    fused = FusedDecoder(model)
    for _ in range(2):
        expected = through(model, fused.hidden(*inputs()))
    model.zero_grad()
    first, second = fused.hidden(*inputs()), fused.hidden(*inputs([3, 4]))
    second.sum().backward()
    assert_equal(through(model, first), expected)
    dropped = fused.hidden(*inputs())
    assert dropped.grad_fn.held is not None
    del dropped
    assert fused.hidden(*inputs()).grad_fn.held is not None


def test_weights_that_moved_are_captured_again(recorded):
    model = trainable()
    fused = FusedDecoder(model)
    for _ in range(2):
        through(model, fused.hidden(*inputs()))
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 2
    expected = through(model, FusedDecoder(model).hidden(*inputs()))
    assert_equal(through(model, fused.hidden(*inputs())), expected)
    assert len(recorded) == 4


def test_large_models_are_not_captured(recorded, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_LAUNCHED_WEIGHTS", 1000)
    model = trainable()
    fused = FusedDecoder(model)
    for _ in range(3):
        fused.hidden(*inputs()).sum().backward()
    assert not recorded


@pytest.mark.parametrize("lengths", [[1], [512], [513], [3, 500, 9], [1000] * 16, [7] * 100, [1024] * 16])
def test_rounded_shapes_hold_the_sequences(lengths):
    tokens, sequences, longest = graphs._rounded_shape(lengths)
    bounds = graphs._padded_bounds(lengths, tokens, sequences, longest)
    assert 0 <= tokens - sum(lengths) < max(512, sum(lengths) / 8)
    assert len(bounds) == sequences + 1 and bounds[0] == 0 and bounds[-1] == tokens
    assert np.diff(bounds)[: len(lengths)].tolist() == lengths
    assert np.diff(bounds).min() >= 0 and np.diff(bounds).max() <= longest


def test_hooks_and_replaced_modules_are_noticed():
    model = trainable()
    fused = FusedDecoder(model)
    assert fused.is_current
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not fused.is_current
    handle.remove()
    assert fused.is_current
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 64, bias=False)
    assert not fused.is_current


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_at_first_use(family):
    model = trainable(family)
    assert agrees(FusedDecoder(model), model, tolerance=1e-4)


@pytest.mark.parametrize("wrong", ["input_layernorm", "mlp.down_proj", "self_attn.v_proj"])
def test_the_check_at_first_use_sees_another_arithmetic(wrong):
    model = trainable()
    fused = FusedDecoder(model)
    module = model.model.layers[1].get_submodule(wrong)
    forward = module.forward
    module.forward = lambda x: forward(x) * 1.2
    assert not agrees(fused, model)


def test_it_serves_on_a_gpu_only():
    assert fused_decoder(trainable()) is None
