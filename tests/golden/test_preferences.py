"""DPO, IPO and KTO worked by hand: value and gradient, however the batch is cut; and what the source makes of a file."""

import json
from math import exp, log

import numpy as np
import pytest
import torch

from ludic.batch_gen import PreferenceBatchSource
from ludic.inference import ByteTemplate
from ludic.training import make_dpo, make_ipo, make_kto
from ludic.training.learner.batches import prepare
from ludic.training.learner.frozen import Reference
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.mini_batches import groups_of
from ludic.training.learner.packing import balanced_shares
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import ActionTokens, BatchFacts
from ludic.training.trainer import TrainerConfig
from ludic.types import ConfigError, SAWBatch
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.bandit import tiny_llama

pytestmark = pytest.mark.slow

near = pytest.approx


def sigmoid(x):
    return 1 / (1 + exp(-x))


def tokens(implied, weights, names, lengths=None, num_items=None):
    """One or more tokens per sample, whose ℓ − ℓ_ref add up to `implied`."""
    lengths = lengths or [1] * len(implied)
    logps = [value / length - 1.0 for value, length in zip(implied, lengths, strict=True) for _ in range(length)]
    index = np.repeat(np.arange(len(implied)), lengths)
    return ActionTokens(
        logps=torch.tensor(logps, dtype=torch.float64, requires_grad=True),
        ref_logps=torch.full((len(index),), -1.0, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64)[index],
        item_index=torch.tensor(index),
        num_items=len(implied),
        facts=BatchFacts(num_items=num_items or len(implied), num_tokens=len(index)),
        comparisons=tuple(names),
    )


def check(loss, given, value, gradient, **stats):
    found, reported = loss(given)
    found.backward()
    assert found.item() == near(value) and given.logps.grad.tolist() == near(gradient)
    means = {name: float(total) / float(count) for name, (total, count) in reported.items() if count}
    assert {name: means[name] for name in stats} == near(stats)


def test_dpo_on_two_pairs():
    # h = 3 − 1 = 2 and −1 − 0.5 = −1.5, β = 0.5. ∂(−log σ(βh))/∂h = −β σ(−βh), half of it each, with the sign of the side.
    given = tokens([3.0, 1.0, 0.5, -1.0], [1, -1, -1, 1], ["a", "a", "b", "b"])
    first, second = 0.5 * sigmoid(-1.0) / 2, 0.5 * sigmoid(0.75) / 2
    check(
        make_dpo(beta=0.5).loss,
        given,
        -(log(sigmoid(1.0)) + log(sigmoid(-0.75))) / 2,
        [-first, first, second, -second],
        margin=0.5 * (2.0 - 1.5) / 2,
        preference_accuracy=0.5,
        chosen_reward=0.5,
        rejected_reward=0.375,
    )


def test_ipo_on_two_pairs():
    # β = 0.5: the gap is drawn to 1: (2 − 1)² and (−1.5 − 1)², slopes 2 and −5, over two pairs
    given = tokens([3.0, 1.0, 0.5, -1.0], [1, -1, -1, 1], ["a", "a", "b", "b"])
    check(make_ipo(beta=0.5).loss, given, (1 + 6.25) / 2, [1.0, -1.0, 2.5, -2.5])


def test_a_length_normalised_gap_is_that_of_means():
    # d = 3 over 3 tokens and 1 over 1: h = 1 − 1 = 0, slope −β/2, shared by the three tokens
    given = tokens([3.0, 1.0], [1, -1], ["a", "a"], lengths=[3, 1])
    check(make_dpo(beta=0.4, length_normalize=True).loss, given, log(2), [-0.2 / 3] * 3 + [0.2])


def test_kto_on_two_comparisons():
    # a: z = (0.2 + 0.6) / 2 = 0.4; wanted d = 1: 1 − σ(β 0.6); unwanted d = −1: 1 − σ(β (0.4 + 1)).
    # b: z = max(0, −3) = 0; wanted d = 2; unwanted d = 0.5. β = 0.5; λ = 1 and 2. Slope of 1 − σ(x) is −σ(x) σ(−x) β.
    given = tokens([1.0, -1.0, 0.2, 0.6, 2.0, 0.5, -2.0, -4.0], [1, -1, 0, 0, 1, -1, 0, 0], ["a"] * 4 + ["b"] * 4)
    at = [(0.5 * 0.6, 1, 1), (0.5 * 1.4, 2, -1), (0.5 * 2.0, 1, 1), (-0.5 * 0.5, 2, -1)]
    slopes = [-scale * sigmoid(x) * sigmoid(-x) * 0.5 * sign / 4 for x, scale, sign in at]
    check(
        make_kto(beta=0.5, unwanted=2.0).loss,
        given,
        sum(scale * (1 - sigmoid(x)) for x, scale, _ in at) / 4,
        [slopes[0], slopes[1], 0.0, 0.0, slopes[2], slopes[3], 0.0, 0.0],
        wanted_reward=0.75,
        unwanted_reward=-0.125,
        kl_baseline=0.2,
    )


@pytest.mark.parametrize("make", [make_dpo, make_ipo])
def test_pairs_in_two_micro_batches_add_up(make):
    loss = make(beta=0.5).loss
    whole = loss(tokens([3.0, 1.0, 0.5, -1.0], [1, -1, -1, 1], ["a", "a", "b", "b"]))[0]
    parts = [
        loss(tokens([3.0, 1.0], [1, -1], "aa", num_items=4))[0],
        loss(tokens([0.5, -1.0], [-1, 1], "bb", num_items=4))[0],
    ]
    assert sum(part.item() for part in parts) == near(whole.item())


def test_what_is_no_pair_is_refused():
    loss = make_dpo().loss
    with pytest.raises(ConfigError, match="one above 0"):
        loss(tokens([1.0, 2.0], [1, 1], "aa"))
    with pytest.raises(ConfigError, match="one above 0"):
        loss(tokens([1.0], [1], "a"))
    with pytest.raises(ConfigError, match="PreferenceBatchSource"):
        loss(tokens([1.0, 2.0], [1, -1], ()))
    with pytest.raises(ConfigError, match="as many of both"):
        make_kto().loss(tokens([1.0, 2.0], [1, -1], "aa"))


# --- in the trainer ---

PAIRS = [{"prompt": f"q{n}", "chosen": "yes" * (1 + n % 3), "rejected": "no" * (1 + n % 2)} for n in range(6)]
LABELS = [{"prompt": f"q{n}", "completion": "ab" * (1 + n % 3), "label": n % 2 == 0} for n in range(8)]


async def batch(rows, size, **settings):
    return (await PreferenceBatchSource(rows, ByteTemplate(), batch_size=size, **settings).next_batch()).items


def by_hand(model, reference, items, kind, beta):
    """Each sample alone through plain forward passes, then the formulae."""

    def implied(item):
        ids = torch.tensor(item.input_ids, dtype=torch.long)
        own, ref = (torch.log_softmax(m(input_ids=ids[None]).logits[0].float(), -1) for m in (model, reference))
        at = np.flatnonzero(item.action_mask)
        return sum(own[t - 1, ids[t]] - ref[t - 1, ids[t]].detach() for t in at)

    d, total, count = [implied(item) for item in items], 0.0, 0
    for name in dict.fromkeys(item.origin.comparison for item in items):
        own = [(value, item.weight) for value, item in zip(d, items, strict=True) if item.origin.comparison == name]
        if kind == "kto":
            z = max(
                0.0, float(sum(value.detach() for value, weight in own if weight == 0)) / sum(w == 0 for _, w in own)
            )
            terms = [1 - torch.sigmoid(weight * beta * (value - z)) for value, weight in own if weight]
        else:
            gap = sum(weight * value for value, weight in own)
            terms = [-torch.log(torch.sigmoid(beta * gap)) if kind == "dpo" else (gap - 1 / (2 * beta)) ** 2]
        total, count = total + sum(terms), count + len(terms)
    return total / count


@pytest.mark.parametrize("form", ["packed", "padded", "shared", "split"])
@pytest.mark.parametrize(("kind", "make"), [("dpo", make_dpo), ("ipo", make_ipo), ("kto", make_kto)])
async def test_the_trainers_gradient_is_that_of_the_formula(kind, make, form):
    model = new_model("llama", seed=0, initializer_range=0.1, vocab_size=264).requires_grad_(True)
    reference = new_model("llama", seed=1, initializer_range=0.1, vocab_size=264)
    items = await batch(LABELS if kind == "kto" else PAIRS, 8 if kind == "kto" else 6, shuffle=False)
    expected = by_hand(model, reference, items, kind, 0.3)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sums = accumulate_gradients(
        TrainedPolicy(model, packed=form != "padded", share_prefixes=form == "shared"),
        make(beta=0.3).loss,
        items,
        micro_token_budget=120 if form == "split" else 1000,
        reference=Reference(TrainedPolicy(reference)),
    )
    means = sums.means()
    assert (means["num_micro_batches"] > 1) is (form == "split")
    assert means["loss"] == near(expected.item(), rel=1e-4)
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, wanted[name], atol=2e-5 * max(1.0, float(wanted[name].abs().max()))), name


async def test_a_comparison_is_never_split():
    items = await batch(PAIRS, 6)
    for shares in (False, True):
        for share in balanced_shares(items, 3, share_prefixes=shares):
            names = [item.origin.comparison for item in share]
            assert all(names.count(name) == 2 for name in names) and names
    with pytest.raises(ConfigError, match="comparison"):
        accumulate_gradients(
            TrainedPolicy(tiny_llama()), make_dpo().loss, items, micro_token_budget=max(len(i.input_ids) for i in items)
        )


async def test_mini_batches_hold_whole_comparisons():
    items = await batch(PAIRS, 6)
    assert groups_of(items) == [[n, n + 1] for n in range(0, 12, 2)]


async def test_a_pair_is_dropped_with_its_longer_half():
    items = await batch([*PAIRS, {"prompt": "q", "chosen": "long" * 20, "rejected": "n"}], 7, shuffle=False)
    cfg = TrainerConfig(max_seq_len=40, micro_token_budget=200, too_long="drop")
    prepared = prepare(SAWBatch(items=items), make_dpo(), cfg, 0)
    assert len(items) == 14 and len(prepared.items) == 12


# --- the source ---


async def test_a_pair_is_rendered_as_the_template_writes_it(tmp_path):
    path = tmp_path / "pairs.jsonl"
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "chosen": "ab", "rejected": [{"role": "assistant", "content": "c"}]}  # fmt: skip
    path.write_text(json.dumps(row) + "\n")
    chosen, rejected = (await PreferenceBatchSource(path, ByteTemplate(), batch_size=4).next_batch()).items
    for item, text, weight in ((chosen, "ab", 1.0), (rejected, "c", -1.0)):
        full = ByteTemplate().apply(
            [*row["messages"], {"role": "assistant", "content": text}], add_generation_prompt=False
        )
        assert item.input_ids.tolist() == full.prompt_token_ids.tolist() and item.weight == weight
        assert ByteTemplate().decode_reply(item.input_ids[item.action_mask]) == text
    assert chosen.origin.comparison == rejected.origin.comparison is not None


async def test_labelled_rows_get_the_next_ones_completion_for_the_kl():
    items = await batch(LABELS, 8, shuffle=False)
    assert [item.weight for item in items] == [1.0, 0.0, -1.0, 0.0] * 4
    texts = [ByteTemplate().decode_reply(item.input_ids[item.action_mask]) for item in items]
    own = [row["completion"] for row in LABELS]
    assert texts[0::2] == own and texts[1::2] == [own[1], own[2], own[3], own[0], own[5], own[6], own[7], own[4]]
    assert len({item.origin.comparison for item in items}) == 2


async def test_epochs_are_shuffled_and_resume_where_they_were():
    source = PreferenceBatchSource(PAIRS, ByteTemplate(), batch_size=4)
    assert source.num_batches_per_epoch == 2 and len(source) == 6
    seen = [await source.next_batch() for _ in range(3)]
    assert [len(found.items) for found in seen] == [8, 4, 8] and [found.meta["epoch"] for found in seen] == [0, 0, 1]
    assert sorted(i.input_ids.tolist() for i in [*seen[0].items, *seen[1].items]) == sorted(
        i.input_ids.tolist() for i in await batch(PAIRS, 6)
    )
    state, following = source.state_dict(), await source.next_batch()
    again = PreferenceBatchSource(PAIRS, ByteTemplate(), batch_size=4)
    again.load_state_dict(state)
    found = await again.next_batch()
    assert [i.input_ids.tolist() for i in found.items] == [i.input_ids.tolist() for i in following.items]
    with pytest.raises(ConfigError, match="6 preferences"):
        PreferenceBatchSource(PAIRS[:2], ByteTemplate()).load_state_dict(state)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"prompt": "q", "chosen": "a"}], "with chosen and rejected"),
        ([{"quest": "q", "answer": "a"}], "^Row 1 has no prompt under question, prompt .* needs question and answer"),
        ([{"question": "q", "reply": "a"}], "^Row 1 has only question, reply. A row needs question and answer"),
        ([{"chosen": "a", "rejected": "b"}], "no prompt"),
        ([{"prompt": "q", "chosen": "a", "rejected": "a"}], "to itself"),
        ([{"prompt": "q", "chosen": "", "rejected": "a"}], "chosen is ''"),
        ([PAIRS[0], PAIRS[0] | {"prompt": [{"content": "q"}]}], "Preference 2.*needs a role and a text"),
        ([PAIRS[0] | {"prompt": ["q"]}], "needs a role and a text"),
        ([PAIRS[0] | {"prompt": [{"role": "user"}]}], "needs a role and a text"),
        ([PAIRS[0] | {"prompt": [{"role": "user", "content": 3}]}], "needs a role and a text"),
        ([PAIRS[0], LABELS[0]], "one kind"),
        (LABELS[:2], "kl_samples=4"),
        ([], "missing"),
    ],
)
def test_rows_that_cannot_be_read_are_named(rows, what):
    with pytest.raises(ConfigError, match=what):
        PreferenceBatchSource(rows, ByteTemplate())
