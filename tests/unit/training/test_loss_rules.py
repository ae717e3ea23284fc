"""What must hold of all losses: agreement at ratio 1, KL gradients, splitting, the padded form, and bad input.

Values and gradients worked by hand are in tests/golden/test_losses.py.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.training.learner.packing import collate_saw_items, pack
from ludic.training.losses import (
    ActionTokens,
    BatchFacts,
    BatchNormalized,
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    CorrectedLoss,
    DivergenceMask,
    EntropyBonus,
    GMPOLoss,
    KLLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    NegativeSequenceMask,
    ObservationLoss,
    Reduction,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    SequenceMask,
    SequenceTruncation,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TokenMask,
    TokenRejection,
    TokenTruncation,
    ValueLoss,
    mismatch_stats,
    tokens_from_logits,
)
from ludic.training.losses.corrections import make_correction
from ludic.types import ActorTokenLogps, ConfigError, SampleAttachments, SAWItem

pytestmark = pytest.mark.slow

REDUCTIONS = [
    Reduction("sample_sum"), Reduction("sample_mean"), Reduction("episode_mean"), Reduction("token_mean"),
    Reduction("constant", 7),
]  # fmt: skip
LOSSES = {
    **{f"reinforce-{r.kind}": ReinforceLoss(reduction=r) for r in REDUCTIONS},
    **{f"token_clip-{r.kind}": TokenClippedSurrogateLoss(reduction=r) for r in REDUCTIONS},
    "reinforce_geometric": ReinforceLoss(length_normalize=True),
    "reinforce_baseline": ReinforceBaselineLoss(normalize=True),
    "token_clip-capped": TokenClippedSurrogateLoss(ratio_clip=1.5),
    "gspo": ClippedSurrogateLoss(length_normalize=True, clip_eps_low=0.1, clip_eps_high=0.1),
    "gspo-episode_mean": ClippedSurrogateLoss(
        length_normalize=True, clip_eps_low=0.1, clip_eps_high=0.1, reduction="episode_mean"
    ),
    "sequence_clip": ClippedSurrogateLoss(ratio_clip=3.0, clip_eps_low=0.5, clip_eps_high=0.5),
    "cispo": CISPOLoss(),
    "sapo": SAPOLoss(),
    "gmpo": GMPOLoss(),
    "gmpo-episode_mean": GMPOLoss(reduction="episode_mean"),
    "gmpo_sum": GMPOLoss(length_normalize=False, ratio_clip=2.0),
    "sft": MaskedCausalLMCrossEntropyLoss(),
    **{
        f"{kind.__name__}-{to}-{k}": kind(to=to, estimator=k)
        for kind, to, k in product([TokenKLLoss, KLLoss], ["actor", "reference"], ["k1", "k2", "k3"])
    },
    **{
        f"{kind.__name__}-{to}-{k}-weighted": kind(to=to, estimator=k, importance_weighted=True, weight_cap=3.0)
        for kind, to, k in product([TokenKLLoss, KLLoss], ["actor", "reference"], ["k1", "k2", "k3"])
    },
    "kl_geometric": KLLoss(length_normalize=True),
    "decoupled": TokenClippedSurrogateLoss(behavior_cap=1.5, reduction="episode_mean"),
    "masked": CorrectedLoss(
        ReinforceBaselineLoss(), [NegativeSequenceMask(0.05), DivergenceMask(0.1), DivergenceMask(0.05, "kl")]
    ),
    "entropy": EntropyBonus(),
    "value": ValueLoss(),
    "batch_normalised": BatchNormalized(TokenClippedSurrogateLoss()),
    "composite": CompositeLoss(
        [LossTerm(name="policy", loss=CISPOLoss()), LossTerm(name="h", loss=EntropyBonus(), weight=0.5)]
    ),
    "corrected": CorrectedLoss(
        ReinforceBaselineLoss(),
        [TokenTruncation(1.5), SequenceTruncation(), TokenMask(0.3, 3.0), SequenceMask(0.5, 2.0), TokenRejection(2.5)],
    ),
}
every_loss = pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES.keys())


def random_batch(lengths, *, seed=0, mismatch=0.3, dtype=torch.float64):
    """Samples of these lengths, every other one of the episode "a"; log-probs, entropies and values are leaves that gather gradients."""
    draw = torch.Generator().manual_seed(seed)

    def normal(n):
        return torch.randn(n, generator=draw, dtype=dtype)

    num_items, num_tokens = len(lengths), sum(lengths)
    item_index = torch.repeat_interleave(torch.arange(num_items), torch.tensor(lengths, dtype=torch.long))
    weights_B = normal(num_items)
    logps = -normal(num_tokens).abs()
    episodes = tuple(None if item % 2 else "a" for item in range(num_items))
    return ActionTokens(
        logps=logps.clone().requires_grad_(),
        weights=weights_B[item_index],
        item_index=item_index,
        num_items=num_items,
        facts=BatchFacts(
            num_items=num_items,
            num_tokens=num_tokens,
            weight_mean=float(weights_B.mean()),
            weight_std=float(weights_B.std(unbiased=False)),
            num_episodes=1 + num_items // 2,
            episode_tokens={"a": sum(lengths[::2])},
        ),
        episodes=episodes,
        old_logps=logps + mismatch * normal(num_tokens),
        proximal_logps=logps + mismatch * normal(num_tokens),
        ref_logps=logps + mismatch * normal(num_tokens),
        entropy=normal(num_tokens).abs().requires_grad_(),
        values=normal(num_tokens).requires_grad_(),
        returns=normal(num_tokens),
        old_values=normal(num_tokens),
    )


PER_TOKEN = [
    "logps",
    "weights",
    "old_logps",
    "proximal_logps",
    "ref_logps",
    "entropy",
    "values",
    "returns",
    "old_values",
]
LEAVES = ["logps", "entropy", "values"]


def some_items(tokens, kept):
    """The micro-batch with these samples, in this order; the facts stay those of the whole batch."""
    rows = torch.cat([(tokens.item_index == item).nonzero()[:, 0] for item in kept])
    own_index = torch.tensor([kept.index(item) for item in tokens.item_index[rows].tolist()], dtype=torch.long)
    fields = {name: getattr(tokens, name)[rows] for name in PER_TOKEN}
    episodes = tuple(tokens.episodes[item] for item in kept)
    return replace(tokens, **fields, item_index=own_index, num_items=len(kept), episodes=episodes)


def gradients(loss, tokens):
    leaves = [getattr(tokens, name) for name in LEAVES]
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def gradient(loss_fn, tokens):
    """With respect to the log-probs."""
    return torch.autograd.grad(loss_fn(tokens)[0], tokens.logps)[0]


# --- closed forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.kind)
@pytest.mark.parametrize(
    "kind", [TokenClippedSurrogateLoss, CISPOLoss, SAPOLoss, ReinforceLoss, MaskedCausalLMCrossEntropyLoss]
)
def test_at_ratio_one_every_token_loss_has_the_policy_gradient(kind, reduction):
    tokens = random_batch([3, 1, 4], mismatch=0.0)
    tokens = replace(tokens, weights=torch.linspace(-2, 2, 8, dtype=torch.float64))  # turns credited differently
    lengths = torch.tensor([3, 3, 3, 1, 4, 4, 4, 4])
    episodes = torch.tensor([7, 7, 7, 1, 7, 7, 7, 7])  # the first and the last sample are one
    divisor = {
        "sample_sum": 3, "sample_mean": 3 * lengths, "episode_mean": 2 * episodes, "token_mean": 8, "constant": 3 * 7,
    }[reduction.kind]  # fmt: skip
    torch.testing.assert_close(gradient(kind(reduction=reduction), tokens), -tokens.weights / divisor)


@pytest.mark.parametrize("kind", [ClippedSurrogateLoss, GMPOLoss])
@pytest.mark.parametrize("length_normalize", [True, False])
def test_at_ratio_one_a_sequence_loss_is_reinforce_with_the_same_normalisation(kind, length_normalize):
    tokens = random_batch([3, 1, 4], mismatch=0.0)
    reinforce = gradient(ReinforceLoss(length_normalize=length_normalize), tokens)
    torch.testing.assert_close(gradient(kind(length_normalize=length_normalize), tokens), reinforce)


@pytest.mark.parametrize("kind", [ClippedSurrogateLoss, GMPOLoss])
def test_at_ratio_one_a_sequence_loss_averages_over_episodes_as_a_token_loss_does(kind):
    tokens = random_batch([3, 1, 4], mismatch=0.0)
    by_token = gradient(TokenClippedSurrogateLoss(reduction="episode_mean"), tokens)
    torch.testing.assert_close(gradient(kind(length_normalize=True, reduction="episode_mean"), tokens), by_token)


def test_losses_differ_at_ratios_other_than_one():
    # Guards the two tests above against a batch on which everything agrees.
    tokens = random_batch([3, 1, 4], mismatch=0.5)
    kinds = [TokenClippedSurrogateLoss, CISPOLoss, SAPOLoss, ReinforceLoss, MaskedCausalLMCrossEntropyLoss]
    found = [gradient(kind(reduction="token_mean"), tokens) for kind in kinds]
    assert all(not torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


POLICY = torch.tensor([0.5, -1.0, 0.2, 1.5, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.3, -0.7, 0.1, 0.4], dtype=torch.float64)


def kl(p_logits, q_logits):
    p, q = torch.log_softmax(p_logits, -1), torch.log_softmax(q_logits, -1)
    return (p.exp() * (p - q)).sum()


def expected_gradient(loss_fn, length):
    """Exact: all sentences of `length` words from the policy, each weighed by its probability."""
    total = torch.zeros(5, dtype=torch.float64)
    for words in product(range(5), repeat=length):
        logits = POLICY.clone().requires_grad_()
        logps = torch.log_softmax(logits, -1)[list(words)]
        anchor = torch.log_softmax(REFERENCE, -1)[list(words)]
        tokens = ActionTokens(
            logps=logps,
            weights=torch.zeros(length, dtype=torch.float64),
            item_index=torch.zeros(length, dtype=torch.long),
            num_items=1,
            facts=BatchFacts(num_items=1, num_tokens=length),
            old_logps=anchor,
            ref_logps=anchor,
        )
        (own,) = torch.autograd.grad(loss_fn(tokens), logits)
        total += logps.sum().exp().item() * own
    return total


def exact_gradient(function):
    logits = POLICY.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


@pytest.mark.parametrize("to", ["actor", "reference"])
@pytest.mark.parametrize("kind", [TokenKLLoss, KLLoss])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_expected_gradient_of_a_kl_estimator_is_the_gradient_of_a_kl(estimator, kind, to):
    length = 2
    how = {"reduction": "sample_sum"} if kind is TokenKLLoss else {}
    found = expected_gradient(lambda tokens: kind(estimator=estimator, to=to, **how)(tokens)[0], length)
    forward = exact_gradient(lambda logits: length * kl(logits, REFERENCE))
    backward = exact_gradient(lambda logits: length * kl(REFERENCE, logits))
    assert not torch.allclose(forward, backward, rtol=0.05)
    torch.testing.assert_close(found, backward if estimator == "k3" else forward)


def test_the_gradient_of_the_log_ratio_itself_has_mean_zero():
    found = expected_gradient(lambda tokens: (tokens.logps - tokens.old_logps).sum(), 1)
    torch.testing.assert_close(found, torch.zeros(5, dtype=torch.float64))
    assert exact_gradient(lambda logits: kl(logits, REFERENCE)).norm() > 0.3


# --- however a batch is cut, the sum is the same --------------------------------------------------------------


@every_loss
@settings(max_examples=8)
@given(data=st.data())
def test_losses_of_micro_batches_sum_to_the_loss_of_the_batch(loss_fn, data):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
    place = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    tokens = random_batch(lengths, seed=data.draw(st.integers(0, 99)))
    bins = [[i for i, p in enumerate(place) if p == b] for b in sorted(set(place))]

    whole, whole_stats = loss_fn(tokens)
    parts = [loss_fn(some_items(tokens, kept)) for kept in bins]

    torch.testing.assert_close(torch.stack([loss for loss, _ in parts]).sum(), whole)
    sums = [sum(g) for g in zip(*[gradients(loss, tokens) for loss, _ in parts], strict=True)]
    torch.testing.assert_close(sums, list(gradients(whole, tokens)))
    for name, (total, count) in whole_stats.items():
        own_total = sum(float(stats[name][0]) for _, stats in parts)
        own_count = sum(float(stats[name][1]) for _, stats in parts)
        assert own_total / own_count == pytest.approx(float(total) / float(count), rel=1e-5, abs=1e-6), name


@given(place=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_mismatch_statistics_of_micro_batches_sum_to_those_of_the_batch(place):
    tokens = random_batch([2, 1, 3, 2])
    bins = [[i for i, p in enumerate(place) if p == b] for b in sorted(set(place))]
    parts = [mismatch_stats(some_items(tokens, kept)) for kept in bins]
    for name, (total, count) in mismatch_stats(tokens).items():
        assert sum(float(p[name][0]) for p in parts) == pytest.approx(float(total), rel=1e-5)
        assert sum(p[name][1] for p in parts) == count


@every_loss
def test_a_sample_without_action_tokens_adds_nothing(loss_fn):
    tokens = random_batch([3, 2])
    joined = replace(tokens, num_items=3, episodes=(*tokens.episodes, "a"))  # the third has no tokens
    (a, _), (b, stats) = loss_fn(tokens), loss_fn(joined)
    torch.testing.assert_close(a, b)
    if "avg_action_tokens" in stats:
        total, count = stats["avg_action_tokens"]
        assert float(total) / count == pytest.approx(5 / 3)
    torch.testing.assert_close(gradients(a, tokens), gradients(b, tokens))
    alone = some_items(replace(random_batch([3, 2, 0]), facts=tokens.facts), [2])
    assert loss_fn(alone)[0].item() == 0.0


# --- the padded form ------------------------------------------------------------------------------------------

VOCABULARY = 6
PADDED = {name: loss for name, loss in LOSSES.items() if not (loss.needs.values or loss.needs.proximal)}


def saw_items(with_logps=True):
    """Three samples of 5, 2 and 7 tokens; the last has two turns, credited differently."""
    masks = [[0, 0, 1, 1, 1], [0, 1], [0, 1, 1, 0, 0, 1, 0]]
    weights = [1.5, -0.5, -1.0]
    draw = torch.Generator().manual_seed(1)
    items = []
    for mask, weight in zip(masks, weights, strict=True):
        ids = torch.randint(VOCABULARY, (len(mask),), generator=draw).tolist()
        logps = (-torch.rand(sum(mask), generator=draw) - 1).tolist() if with_logps else None
        own = [-1.5, -1.5, 0.0] if weight == -1.0 else None
        items.append(SAWItem(ids, None, mask, weight, {}, _attachments(logps, own)))
    return items


def _attachments(logps, token_weights):
    return SampleAttachments(
        actor_logps=None if logps is None else ActorTokenLogps(logps), token_weights=token_weights, temperature=1.0
    )


def padded_case(with_logps=True):
    items = saw_items(with_logps)
    batch = collate_saw_items(items, pad_token_id=0)
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 7, VOCABULARY, generator=draw).requires_grad_()
    batch["ref_logps"] = -torch.rand(3, 7, generator=draw) - 1
    return items, batch, logits


def flat_tokens(items, batch, logits):
    """The same from `pack`: one row of logits after the other, real tokens only."""
    fields = pack(items, "cpu").actions
    rows = torch.cat([logits[b, : len(item.input_ids)] for b, item in enumerate(items)])
    log_probs = torch.log_softmax(rows[fields.predictor_A], dim=-1)
    mask = batch["action_mask"].bool()
    return ActionTokens(
        logps=log_probs[torch.arange(fields.num_tokens), fields.target_A],
        weights=fields.weight_A,
        item_index=fields.item_A,
        num_items=3,
        # weights 1.5, −0.5, −1: mean 0, variance (2.25 + 0.25 + 1) / 3
        facts=BatchFacts(num_items=3, num_tokens=7, weight_mean=0.0, weight_std=(3.5 / 3) ** 0.5),
        old_logps=fields.old_logp_A,
        ref_logps=batch["ref_logps"][mask],
        entropy=-(log_probs.exp() * log_probs).sum(-1),
    )


@pytest.mark.parametrize("loss_fn", PADDED.values(), ids=PADDED.keys())
def test_the_padded_form_equals_the_flat_form(loss_fn):
    items, batch, logits = padded_case()
    padded, stats = loss_fn.compute(logits, batch)
    flat, flat_stats = loss_fn(flat_tokens(items, batch, logits))
    torch.testing.assert_close(padded, flat)
    torch.testing.assert_close(torch.autograd.grad(padded, logits), torch.autograd.grad(flat, logits))
    means = {name: float(total) / float(count) for name, (total, count) in flat_stats.items()}
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {"loss": flat.item(), **means}, rel=1e-5, abs=1e-6
    )


SEQUENCE_LOSSES = {
    "reinforce": ReinforceLoss(),
    "reinforce_geometric": ReinforceLoss(length_normalize=True),
    "reinforce_baseline": ReinforceBaselineLoss(),
    "sequence_clip": ClippedSurrogateLoss(clip_eps_low=0.9, clip_eps_high=5.0),
    "gspo": ClippedSurrogateLoss(clip_eps_low=0.9, clip_eps_high=5.0, length_normalize=True),
    **{f"kl-{k}": KLLoss(estimator=k) for k in ("k1", "k2", "k3")},
}


@pytest.mark.parametrize("loss_fn", SEQUENCE_LOSSES.values(), ids=SEQUENCE_LOSSES.keys())
def test_a_sequence_loss_needs_only_the_samples_log_prob(loss_fn):
    _, batch, logits = padded_case()
    full, _ = loss_fn.compute(logits, batch)
    del batch["actor_logps"]
    summed, _ = loss_fn.compute(logits, batch)
    torch.testing.assert_close(summed, full)
    torch.testing.assert_close(torch.autograd.grad(summed, logits), torch.autograd.grad(full, logits))


def test_entropy_is_that_of_the_distribution_an_action_was_drawn_from():
    # Uniform where an action token is predicted, certain everywhere else: the mean must be ln 6, nothing of the others.
    items, batch, _ = padded_case()
    logits = torch.zeros(3, 7, VOCABULARY)
    logits[..., 0] = 100.0
    for row, item in enumerate(items):
        logits[row, item.action_mask.nonzero()[0] - 1] = 0.0
    _, stats = EntropyBonus().compute(logits, batch)
    assert stats["entropy_mean"].item() == pytest.approx(1.791759)


def test_equal_weights_are_zero_after_normalisation():
    # In float32 the mean of seven 0.1s is not 0.1; divided by a deviation of almost zero, the difference would count.
    items = [SAWItem([1, 2], None, [0, 1], 0.1, {}, _attachments([-1.0], None)) for _ in range(7)]
    batch = collate_saw_items(items, pad_token_id=0)
    loss, _ = BatchNormalized(ReinforceLoss()).compute(torch.zeros(7, 2, VOCABULARY), batch)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


def test_tensors_of_the_wrong_shape_are_refused():
    _, batch, logits = padded_case()
    with pytest.raises(ValueError, match=r"actor_logps has shape \(3, 6\), input_ids \(3, 7\)"):
        tokens_from_logits(logits, {**batch, "actor_logps": batch["actor_logps"][:, 1:]})
    one = {name: tensor[:, :1] for name, tensor in batch.items() if tensor.ndim == 2} | {"weight": batch["weight"]}
    with pytest.raises(ValueError, match="at least 2"):
        tokens_from_logits(logits[:, :1], one)


# --- bad input ------------------------------------------------------------------------------------------------


@every_loss
def test_a_loss_that_needs_the_samplers_log_probs_says_so(loss_fn):
    tokens = replace(random_batch([2, 1]), old_logps=None)
    if loss_fn.needs.old_logps:
        with pytest.raises(KeyError, match=r"actor_logps.*ReturnSpec\.for_rl"):
            loss_fn(tokens)
    else:
        assert loss_fn(tokens)[0].isfinite()


@every_loss
def test_a_loss_that_needs_a_reference_says_so(loss_fn):
    tokens = replace(random_batch([2, 1]), ref_logps=None)
    if loss_fn.needs.reference:
        with pytest.raises(KeyError, match="Trainer\\(reference=…\\)"):
            loss_fn(tokens)
    else:
        assert loss_fn(tokens)[0].isfinite()


def test_wrappers_need_what_their_parts_need():
    parts = [LossTerm(name="a", loss=MaskedCausalLMCrossEntropyLoss()), LossTerm(name="b", loss=EntropyBonus())]
    both = CompositeLoss(parts)
    assert both.needs.entropy and not both.needs.old_logps and not both.needs.reference and not both.needs.values
    assert CompositeLoss([LossTerm(name="kl", loss=TokenKLLoss(to="reference"))]).needs.reference
    assert BatchNormalized(both).needs.entropy and not BatchNormalized(both).needs.old_logps
    corrected = CorrectedLoss(CompositeLoss([LossTerm(name="v", loss=ValueLoss())]), [TokenTruncation()])
    assert corrected.needs.values and corrected.needs.old_logps
    weighted = TokenKLLoss(to="reference", importance_weighted=True)
    assert weighted.needs.old_logps and weighted.needs.reference and not TokenKLLoss(to="reference").needs.old_logps
    decoupled = CorrectedLoss(BatchNormalized(TokenClippedSurrogateLoss(behavior_cap=2.0)), [TokenMask()])
    assert decoupled.needs.proximal and not TokenClippedSurrogateLoss().needs.proximal


def test_correction_is_made_from_its_name_and_numbers():
    made = (
        make_correction("token_mask=0.25,4"),
        make_correction("divergence_mask=0.1"),
        make_correction("sequence_mask"),
    )
    assert [type(one) for one in made] == [TokenMask, DivergenceMask, SequenceMask]
    assert (made[0].low, made[0].high, made[1].limit, made[2].low) == (0.25, 4.0, 0.1, 0.99)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: TokenClippedSurrogateLoss(clip_eps_low=-0.1), "clip_eps_low=-0.1"),
        (lambda: CISPOLoss(clip_eps_high=-1.0), "clip_eps_high=-1.0"),
        (lambda: TokenClippedSurrogateLoss(ratio_clip=0.0), "ratio_clip=0.0"),
        (lambda: SAPOLoss(tau_pos=0.0), "tau_pos=0.0"),
        (lambda: ValueLoss(clip_eps=0.0), "clip_eps=0.0"),
        (lambda: ObservationLoss(coeff=-1.0), "coeff=-1.0"),
        (lambda: TokenTruncation(0.0), "cap=0.0"),
        (lambda: TokenMask(2.0, 0.5), "low=2.0, high=0.5"),
        (lambda: NegativeSequenceMask(-0.1), "max_gap=-0.1"),
        (lambda: DivergenceMask(0.0), "limit=0.0"),
        (lambda: DivergenceMask(0.1, "js"), "kind='js'"),
        (lambda: TokenKLLoss(importance_weighted=True, weight_cap=0.0), "weight_cap=0.0"),
        (lambda: KLLoss(length_normalize=True, importance_weighted=True), "another gradient than its KL"),
        (lambda: make_correction("token_tis"), "no correction 'token_tis'; there are token_truncation"),
        (lambda: make_correction("token_mask=a"), "'token_mask=a' cannot be made"),
        (lambda: CISPOLoss(reduction="constant"), "constant_length"),
        (lambda: Reduction("token_mean", 512), "constant_length=512 is only used by"),
        (
            lambda: ClippedSurrogateLoss(reduction="token_mean"),
            r"ClippedSurrogateLoss\(reduction='token_mean'\).*episode_mean",
        ),
        (lambda: SAPOLoss(reduction="mean"), "reduction='mean'; there are sample_sum, sample_mean"),
        (lambda: TokenKLLoss(estimator="k4"), "estimator='k4'; there are k1, k2, k3"),
        (lambda: KLLoss(to="ref"), "to='ref'; there are 'actor'"),
        (lambda: CompositeLoss([]), "at least one"),
        (lambda: CompositeLoss([LossTerm(name="a", loss=EntropyBonus())] * 2), "each name once"),
    ],
)
def test_invalid_settings_are_refused(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


# --- extremes -------------------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("differences", [[1e4, -1e4, 1e4, -1e4, 0.0], [1e4] * 5, [-1e4] * 5])
def test_extreme_log_ratios_stay_finite(loss_fn, differences):
    tokens = random_batch([2, 3], dtype=torch.float32)
    far = tokens.logps.detach() - torch.tensor(differences)
    tokens = replace(tokens, old_logps=far, ref_logps=far)
    loss, stats = loss_fn(tokens)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(loss, tokens))
    assert all(torch.as_tensor(total).isfinite() for total, _ in stats.values())
    assert all(torch.as_tensor(total).isfinite() for total, _ in mismatch_stats(tokens).values())


@pytest.mark.parametrize("loss_fn", [ReinforceLoss(), ReinforceBaselineLoss(), ReinforceLoss(length_normalize=True)])
def test_a_small_mismatch_over_many_tokens_does_not_magnify_a_sample(loss_fn):
    # 0.05 nats × 400 tokens is a factor e^20 = 4.9e8 for the product; the cap lets at most 2 through.
    tokens = random_batch([400], dtype=torch.float32)
    tokens = replace(tokens, weights=torch.ones(400), old_logps=tokens.logps.detach() - 0.05)
    assert gradient(loss_fn, tokens).abs().max() <= 2.0


@pytest.mark.parametrize("loss_fn", [KLLoss(), KLLoss(estimator="k1"), KLLoss(estimator="k3"), TokenKLLoss()])
def test_kl_losses_have_a_gradient_far_from_the_reference(loss_fn):
    # 0.06 nats × 400 tokens, and 30 nats on a single token: the penalty must not switch itself off.
    many = random_batch([400])
    many = replace(many, old_logps=many.logps.detach() - 0.06)
    one = random_batch([1])
    one = replace(one, old_logps=one.logps.detach() - 30.0)
    assert (gradient(loss_fn, many) > 0).all() and (gradient(loss_fn, one) > 0).all()
