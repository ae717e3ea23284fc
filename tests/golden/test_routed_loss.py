"""Several objectives in one batch, worked by hand: value and gradient with respect to the log-probs.

    token    sample   objective   ℓ       ρ      weight
    t0       a        rl         −1       1.1    +2      within the clip
    t1       a        rl         −2       1      +2
    t2       b        imitate    −3              +1
    t3       b        imitate    −1              +1
    t4       c        rl         −0.5     0.5    −1      pushed down, has gone down: beyond a clip at 0.8
    t5       d        distil     −0.2            +0.5    weights differ within the sample
    t6       d        distil     −0.4            −2

Each term divides by its own samples: 2 of rl, 1 of imitate, 1 of distil (2 tokens).
"""

import pytest
import torch

from ludic.training.losses import (
    ActionTokens,
    BatchFacts,
    BatchNormalized,
    CorrectedLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    ReinforceLoss,
    RoutedLoss,
    TokenClippedSurrogateLoss,
    TokenMask,
    ValueLoss,
    mismatch_stats,
)
from ludic.types import ConfigError

NAN = float("nan")
RL, IMITATE = TokenClippedSurrogateLoss(), MaskedCausalLMCrossEntropyLoss(length_normalize=True)
DISTIL = MaskedCausalLMCrossEntropyLoss(reduction="token_mean")
TERMS = [
    LossTerm(name="rl", loss=RL),
    LossTerm(name="imitate", loss=IMITATE, weight=0.5),
    LossTerm(name="distil", loss=DISTIL, weight=2.0),
]
FACTS = BatchFacts(
    num_items=4,
    num_tokens=7,
    by_objective={
        "rl": BatchFacts(num_items=2, num_tokens=3, weight_mean=0.5, weight_std=1.5),
        "imitate": BatchFacts(num_items=1, num_tokens=2, weight_mean=1.0, weight_std=0.0),
        "distil": BatchFacts(num_items=1, num_tokens=2, weight_mean=-0.75, weight_std=0.0),
    },
)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(**fields):
    logps = f64(-1.0, -2.0, -3.0, -1.0, -0.5, -0.2, -0.4).requires_grad_()
    given = {
        "weights": f64(2.0, 2.0, 1.0, 1.0, -1.0, 0.5, -2.0),
        "item_index": torch.tensor([0, 0, 1, 1, 2, 3, 3]),
        "num_items": 4,
        "facts": FACTS,
        "old_logps": logps.detach() - f64(1.1, 1.0, NAN, NAN, 0.5, NAN, NAN).log(),
        "objectives": ("rl", "imitate", "rl", "distil"),
        "without_old_logps": (1, 3),
    }
    return ActionTokens(logps=logps, **{**given, **fields})


def test_the_loss_is_the_weighted_sum_of_the_terms_and_so_is_the_gradient():
    tokens = batch()
    loss, stats = RoutedLoss(TERMS)(tokens)
    loss.backward()
    # rl: −(1.1·2 + 1·2 − 0.8) / 2;  imitate: (3 + 1) / 2;  distil: (0.5·0.2 − 2·0.4) / 2.
    assert loss.item() == pytest.approx(1.0 * -1.7 + 0.5 * 2.0 + 2.0 * -0.35)
    assert tokens.logps.grad.tolist() == pytest.approx([-1.1, -1.0, -0.25, -0.25, 0.0, -0.5, 2.0])
    means = {name: float(total) / float(count) for name, (total, count) in stats.items()}
    assert means["rl/loss"] == pytest.approx(-1.7) and means["rl/clip_frac"] == pytest.approx(1 / 3)
    assert means["imitate/loss"] == pytest.approx(2.0) and means["imitate/nll_mean"] == pytest.approx(2.0)
    assert means["distil/loss"] == pytest.approx(-0.35)


def test_more_samples_of_one_objective_do_not_dilute_another():
    alone = ActionTokens(
        logps=f64(-1.0, -2.0, -0.5).requires_grad_(),
        weights=f64(2.0, 2.0, -1.0),
        item_index=torch.tensor([0, 0, 1]),
        num_items=2,
        facts=FACTS.by_objective["rl"],
        old_logps=f64(-1.0, -2.0, -0.5) - f64(1.1, 1.0, 0.5).log(),
    )
    mixed = batch()
    RoutedLoss(TERMS)(mixed)[0].backward()
    RL(alone)[0].backward()
    assert mixed.logps.grad[[0, 1, 4]].tolist() == alone.logps.grad.tolist()


def test_a_term_that_centres_weights_uses_the_mean_of_its_samples():
    tokens = batch()
    inner = BatchNormalized(MaskedCausalLMCrossEntropyLoss(length_normalize=False))
    terms = [LossTerm(name="rl", loss=inner), *TERMS[1:]]
    RoutedLoss(terms)(tokens)[0].backward()
    # (A − 0.5) / 1.5 is +1, +1 and −1; over 2 samples, with the sign of a loss.
    assert tokens.logps.grad[[0, 1, 4]].tolist() == pytest.approx([-0.5, -0.5, 0.5])


def test_a_correction_inside_a_term_sees_only_samples_that_have_log_probs():
    tokens = batch()
    terms = [LossTerm(name="rl", loss=CorrectedLoss(ReinforceLoss(ratio_clip=None), [TokenMask(0.8, 2.0)])), *TERMS[1:]]
    RoutedLoss(terms)(tokens)[0].backward()
    # t4's ratio of 0.5 is masked; sample a's ratio is 1.1.
    assert tokens.logps.grad[[0, 1, 4]].tolist() == pytest.approx([-1.1, -1.1, 0.0])
    with pytest.raises(KeyError, match=r"2 of 4 have none.*inside the term"):
        CorrectedLoss(RoutedLoss(TERMS), [TokenMask()])(batch())


def test_the_mismatch_is_measured_on_the_samples_that_have_log_probs():
    (total, count) = mismatch_stats(batch())["ratio_token_mean"]
    assert (float(total), count) == (pytest.approx(1.1 + 1.0 + 0.5), 3.0)


@pytest.mark.parametrize("cut", [([0, 1], [2, 3]), ([0], [1], [2], [3]), ([3, 0], [2, 1])], ids=str)
def test_micro_batches_add_up_to_the_batch(cut):
    whole, parts = batch(), batch()
    loss = RoutedLoss(TERMS)
    value, stats = loss(whole)
    value.backward()
    shares = [loss(parts.select(members, FACTS)) for members in cut]
    total = sum(share for share, _ in shares)
    total.backward()
    assert total.item() == pytest.approx(value.item())
    assert parts.logps.grad.tolist() == pytest.approx(whole.logps.grad.tolist())
    for name, (expected, expected_count) in stats.items():
        found = [own[name] for _, own in shares if name in own]
        assert sum(float(t) for t, _ in found) == pytest.approx(float(expected), rel=1e-6), name
        assert sum(float(c) for _, c in found) == pytest.approx(float(expected_count)), name


@pytest.mark.parametrize("objectives", [(), ("rl", "imitate", "rl", None), ("rl", "imitate", "rl", "distill")], ids=str)
def test_a_sample_without_a_term_is_refused(objectives):
    with pytest.raises(ConfigError, match=r"this loss has terms for rl, imitate, distil.*SampleOrigin\.objective"):
        RoutedLoss(TERMS)(batch(objectives=objectives))


def test_terms_that_cannot_be_routed_are_refused():
    with pytest.raises(ConfigError, match="each name once"):
        RoutedLoss([TERMS[0], TERMS[0]])
    with pytest.raises(ConfigError, match="need a critic"):
        RoutedLoss([LossTerm(name="rl", loss=ValueLoss())])
