"""Several adapters in one pass compute what peft computes with each alone, and never reach each other's rows."""

import copy
import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ludic.models.adapters import AdapterBank, AdapterSpec, LoraAdapter
from ludic.models.head import hidden_states
from ludic.models.packed_attention import PackedSequences
from ludic.models.passes.routing import route_attention
from ludic.types import ConfigError
from ludic_tinker.server.targets import target_logps
from tests.unit.inference.local.tiny_models import VOCAB, new_model

pytest.importorskip("peft", reason="the lora extra is not installed")

import peft

from tests.unit.models.adapters.peft_reference import peft_model, tuned

pytestmark = pytest.mark.slow

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


NAME = "model.layers.0.self_attn.q_proj"


def bank_of(model):
    bank = AdapterBank(model)
    route_attention(bank.model)
    return bank


def texts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def logps_of(bank, rows, adapters, slopes=None):
    """Log-probs of each text's tokens after the first, all texts in one pass; with `slopes`, their gradients are added up."""
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])
    spans = list(zip(adapters, lengths, strict=True))
    with bank.using(spans):
        hidden = hidden_states(bank.model, torch.cat(rows), positions, PackedSequences(lengths, torch.device("cpu")))
    predicting = torch.cat(
        [torch.arange(n - 1) + start for n, start in zip(lengths, np.cumsum([0, *lengths]), strict=False)]
    )
    head = target_logps(
        bank, hidden, spans, predicting, torch.cat([row[1:] for row in rows]), for_backward=slopes is not None
    )
    if slopes is not None:
        grad = head.backward(torch.cat(slopes))
        if hidden.requires_grad:
            hidden.backward(grad)
    return head.logps_P.split([n - 1 for n in lengths])


def peft_logps(model, row):
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, row[1:, None])[:, 0]


def test_new_adapter_has_pefts_values_for_the_same_seed():
    model = new_model()
    adapter = LoraAdapter.create(model, AdapterSpec(rank=3, seed=11))
    torch.manual_seed(11)
    theirs = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=3, lora_alpha=32, target_modules=[*_TARGETS, "lm_head"])
    )
    expected = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert adapter.named().keys() == expected.keys()
    for name, value in adapter.named().items():
        assert torch.equal(value, expected[name]), name
    assert not torch.equal(adapter.flat, LoraAdapter.create(model, AdapterSpec(rank=3)).flat)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", {}),
        ("llama-mha-tied", {"mlp": False}),
        ("qwen3", {"head": False}),
        ("gemma2-softcap", {"attention": False}),
        ("phi-output-bias", {}),
    ],
)
def test_values_and_gradients_equal_peft_for_each_adapter_of_a_mixed_pass(family, parts):
    model = new_model(family)
    specs = [AdapterSpec(rank=4, seed=1, **parts), AdapterSpec(rank=2, alpha=3.0, seed=2, **parts)]
    one, two = (tuned(model, spec, number) for number, spec in enumerate(specs))
    bank = bank_of(model)
    rows, adapters = texts(7, 12, 5, 9), [one, two, None, one]
    weights = [torch.linspace(-1, 2, len(row) - 1) for row in rows]
    found = logps_of(bank, rows, adapters, weights)

    model.set_attn_implementation("eager")
    for adapter in (one, two):
        theirs = peft_model(model, adapter)
        own = [i for i, used in enumerate(adapters) if used is adapter]
        losses = []
        for i in own:
            expected = peft_logps(theirs, rows[i])
            torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=2e-5)
            losses.append((expected * weights[i]).sum())
        sum(losses).backward()
        grads = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
        for (name, _), parameter in zip(adapter.named().items(), adapter.parameters(), strict=True):
            expected = grads[name.replace(".weight", ".default.weight")]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(found[2], peft_logps(model, rows[2]), rtol=1e-5, atol=2e-5)


@functools.cache
def _shared():
    model = new_model()
    return model, bank_of(model)


@settings(max_examples=15, deadline=None)
@given(
    owners=st.lists(st.integers(-1, 3), min_size=1, max_size=6),
    poisoned=st.integers(0, 3),
    value=st.sampled_from([float("nan"), float("inf"), 1e30]),
    seed=st.integers(0, 99),
)
def test_an_adapter_changes_only_its_own_rows_and_gradients(owners, poisoned, value, seed):
    """Whatever values one adapter takes: log-probs and gradients of the others stay bit for bit."""
    model, bank = _shared()
    adapters = [tuned(model, AdapterSpec(rank=1 + n % 3, seed=n, head=n % 2 == 0), n) for n in range(4)]
    rows = texts(*np.random.default_rng(seed).integers(2, 9, len(owners)).tolist(), seed=seed)
    own = [None if n < 0 else adapters[n] for n in owners]

    def run():
        for adapter in adapters:
            for parameter in adapter.parameters():
                parameter.grad = None
        found = logps_of(bank, rows, own, [torch.ones(len(row) - 1) for row in rows])
        grads = [[None if p.grad is None else p.grad.clone() for p in adapter.parameters()] for adapter in adapters]
        return [part.detach().clone() for part in found], grads

    before, grads_before = run()
    with torch.no_grad():
        adapters[poisoned].flat.fill_(value)
    after, grads_after = run()
    for number, (a, b) in zip(owners, zip(before, after, strict=True), strict=True):
        if number != poisoned:
            assert torch.equal(a, b)
    for number in set(range(4)) - {poisoned}:
        for a, b in zip(grads_before[number], grads_after[number], strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
        assert number in owners or all(g is None for g in grads_after[number])


def test_outside_of_a_pass_the_view_is_the_base_model():
    model = new_model()
    bank = AdapterBank(model)
    ids = texts(6)[0][None]
    assert torch.equal(bank.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert all(a is b for a, b in zip(bank.model.parameters(), model.parameters(), strict=True))
    adapter = tuned(model, AdapterSpec(rank=2, seed=0))
    with bank.using([(adapter, 6)]):
        assert not torch.equal(bank.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(bank.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_copy_is_frozen_and_independent_and_load_restores_it():
    model = new_model()
    adapter = tuned(model, AdapterSpec(rank=2, seed=0))
    kept = adapter.copy()
    assert not any(p.requires_grad for p in kept.parameters())
    with torch.no_grad():
        adapter.flat.zero_()
    assert float(kept.flat.abs().sum()) > 0
    adapter.load(kept.named())
    assert torch.equal(adapter.flat, kept.flat)
    other = LoraAdapter.create(model, AdapterSpec(rank=3, seed=0))
    with pytest.raises(ConfigError, match="another shape"):
        other.load(kept.named())


def test_saved_adapter_is_one_of_pefts(tmp_path):
    model = new_model()
    adapter = tuned(model, AdapterSpec(rank=2, seed=0))
    save_file(adapter.named(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter.peft_config("base")))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path))
    row = texts(8)[0]
    torch.testing.assert_close(
        logps_of(bank_of(model), [row], [adapter])[0], peft_logps(theirs, row), rtol=1e-5, atol=2e-5
    )


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": 2, "attention": False, "mlp": False, "head": False}])
def test_spec_that_adapts_nothing_is_refused(wrong):
    with pytest.raises(ConfigError):
        AdapterSpec(**wrong)
