"""Every loss on one tiny batch worked by hand: value and gradient with respect to the log-probs.

The batch, unless a test says otherwise:

    token    sample   ℓ      ρ      ln ρ          weight
    t0       a       −1      1.5    +0.4054651    +2      pushed up, has gone up: beyond a clip at 1.2
    t1       a       −2      1       0            +2      free
    t2       b       −0.5    0.5    −0.6931472    −1      pushed down, has gone down: beyond a clip at 0.8

Sample ratios: a 1.5 · 1 = 1.5 (geometric mean √1.5 = 1.2247449), b 0.5. Weights over samples: mean 0.5, deviation 1.5.
"""

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch

from ludic.training.learner.gradients import batch_facts
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
    Reduction,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    SequenceMask,
    SequenceRejection,
    SequenceTruncation,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TokenMask,
    TokenRejection,
    TokenTruncation,
    ValueLoss,
    mismatch_stats,
)
from ludic.training.losses.corrections import effective_sample_size
from ludic.types import SAWItem

LN_1_5, LN_2 = 0.4054651081081644, 0.6931471805599453

# What a term of t0, t1, t2 is divided by: 2 samples of 2 and 1 tokens; 3 tokens; constant length 4.
DIVISORS = {
    "sample_sum": [2, 2, 2],
    "sample_mean": [4, 4, 2],
    "episode_mean": [4, 4, 2],  # each sample is an episode; tests/golden/test_episode_mean.py has others
    "token_mean": [3, 3, 3],
    "constant": [8, 8, 8],
}


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(ratios=(1.5, 1.0, 0.5), weights=(2.0, 2.0, -1.0), **fields):
    logps = f64(-1.0, -2.0, -0.5).requires_grad_()
    facts = BatchFacts(num_items=2, num_tokens=3, weight_mean=0.5, weight_std=1.5)
    given = {"old_logps": logps.detach() - f64(*ratios).log(), **fields}
    return ActionTokens(
        logps=logps, weights=f64(*weights), item_index=torch.tensor([0, 0, 1]), num_items=2, facts=facts, **given
    )


def means(stats):
    return {name: float(total) / float(count) for name, (total, count) in stats.items() if count}


def check(loss_fn, tokens, value, gradient, **stats):
    loss, reported = loss_fn(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert tokens.logps.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)
    assert {name: means(reported)[name] for name in stats} == pytest.approx(stats, rel=1e-6)


def settings(reduction):
    return {"reduction": Reduction(reduction, 4 if reduction == "constant" else None)}


def check_reduced(loss_fn, tokens, values, gradients, reduction, **stats):
    """`values` and `gradients` are the terms of t0, t1, t2 before division."""
    divisors = DIVISORS[reduction]
    value = sum(v / d for v, d in zip(values, divisors, strict=True))
    check(loss_fn, tokens, value, [g / d for g, d in zip(gradients, divisors, strict=True)], **stats)


every_reduction = pytest.mark.parametrize("reduction", list(DIVISORS))


# --- bounds of each token ------------------------------------------------------------------------------------

OF_EACH = {"clip_eps_low": f64(0.2, 0.2, 0.6), "clip_eps_high": f64(0.1, 0.2, 0.2), "reduction": "sample_sum"}


def test_a_clip_may_differ_from_token_to_token():
    # t0 is held at 1.1: −1.1·2; t1 −1·2; t2 is free down to 0.4: 0.5.
    check(TokenClippedSurrogateLoss(**OF_EACH), batch(), -1.85, [0, -1.0, 0.25], clip_frac=1 / 3)
    # −clip(ρ) A ℓ: 1.1·2, 1·2·2, −0.5·0.5; its gradient −clip(ρ) A.
    check(CISPOLoss(**OF_EACH), batch(), 2.975, [-1.1, -1.0, 0.25], clip_frac=1 / 3)


# --- REINFORCE ------------------------------------------------------------------------------------------------


@every_reduction
def test_reinforce(reduction):
    # −r A ℓ: t0 −1.5·2·(−1) = 3; t1 −1.5·2·(−2) = 6; t2 −0.5·(−1)·(−0.5) = −0.25. Gradient −r A: −3, −3, 0.5.
    check_reduced(
        ReinforceLoss(**settings(reduction)), batch(), [3, 6, -0.25], [-3, -3, 0.5], reduction,
        ratio_mean=1.0, ratio_clip_frac=0.0, adv_mean=0.5, adv_abs_mean=1.5, logp_mean=-3.5 / 3, avg_action_tokens=1.5,
    )  # fmt: skip


def test_reinforce_sums_over_tokens_by_default_and_caps_a_samples_ratio():
    # Cap 1.2: a is weighed 1.2 instead of 1.5, so t0 2.4, t1 4.8, t2 −0.25; sum 6.95 over 2 samples.
    check(ReinforceLoss(ratio_clip=1.2), batch(), 3.475, [-1.2, -1.2, 0.25], ratio_mean=1.0, ratio_clip_frac=0.5)


def test_reinforce_length_normalised_uses_the_geometric_mean_ratio():
    # a: −√1.5 · 2 · mean(−1, −2) = 3 √1.5; b: −0.25. Loss (3 · 1.2247449 − 0.25) / 2 = 1.7121173.
    # Gradient of a's tokens −√1.5 · 2 / 2 tokens / 2 samples = −0.6123724.
    check(ReinforceLoss(length_normalize=True), batch(), 1.7121173, [-0.6123724, -0.6123724, 0.25])


@every_reduction
def test_reinforce_baseline(reduction):
    # A − 0.5 = 1.5, 1.5, −1.5: t0 1.5·1.5·1 = 2.25; t1 4.5; t2 −0.5·(−1.5)·(−0.5) = −0.375.
    check_reduced(
        ReinforceBaselineLoss(**settings(reduction)), batch(), [2.25, 4.5, -0.375], [-2.25, -2.25, 0.75], reduction,
        baseline=0.5, adv_mean=0.0, adv_abs_mean=1.5,
    )  # fmt: skip


def test_reinforce_baseline_normalised():
    # (A − 0.5) / 1.5 = 1, 1, −1: t0 1.5, t1 3, t2 −0.25; sum 4.25.
    check(ReinforceBaselineLoss(normalize=True), batch(), 2.125, [-0.75, -0.75, 0.25], adv_mean=0.0, adv_abs_mean=1.0)


# --- the clipped surrogate ------------------------------------------------------------------------------------


@every_reduction
def test_token_clip(reduction):
    # t0 min(1.5·2, 1.2·2) = 2.4, held; t1 2, gradient −ρ A = −2; t2 min(−0.5, −0.8) = −0.8, held.
    check_reduced(
        TokenClippedSurrogateLoss(**settings(reduction)), batch(), [-2.4, -2, 0.8], [0, -2, 0], reduction,
        clip_frac=2 / 3, ratio_mean=1.0, ratio_clip_frac=0.0,
    )  # fmt: skip


def test_token_clip_keeps_the_gradient_that_brings_a_ratio_back():
    # Weights turned round. t0 min(1.5·(−2), 1.2·(−2)) = −3, free; t1 −2; t2 min(0.5·1, 0.8·1) = 0.5, free.
    # Loss −(−3 − 2 + 0.5) / 2 = 2.25; gradient −ρ A / 2 = 1.5, 1, −0.25.
    check(TokenClippedSurrogateLoss(), batch(weights=(-2, -2, 1)), 2.25, [1.5, 1.0, -0.25], clip_frac=0.0)


def test_token_clip_bounds():
    # 1 − 0.6 … 1 + 0.4: t0 held at 1.4·2 = 2.8; t2 free, −0.5, gradient −ρ A = 0.5.
    loss = TokenClippedSurrogateLoss(clip_eps_low=0.6, clip_eps_high=0.4)
    check(loss, batch(), -(2.8 + 2 - 0.5) / 2, [0, -1, 0.25], clip_frac=1 / 3)


def test_token_clip_with_a_cap_bounds_what_a_negative_weight_can_do():
    # Cap 1.3 on ρ = 1.5 with A = −2: 1.3·(−2) = −2.6 in place of −3, and no gradient. t1 −2 free; t2 0.5 free.
    loss = TokenClippedSurrogateLoss(ratio_clip=1.3)
    check(loss, batch(weights=(-2, -2, 1)), 2.05, [0, 1, -0.25], ratio_mean=1.0, ratio_clip_frac=1 / 3)


def test_sequence_clip():
    # a: r = 1.5 inside 1.6: 1.5·2 = 3, gradient −r A / 2 samples = −1.5 on both tokens; b held at 0.8·(−1).
    loss = ClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.6)
    check(loss, batch(), -(3 - 0.8) / 2, [-1.5, -1.5, 0], clip_frac=1 / 3, ratio_mean=1.0)


def test_sequence_clip_length_normalised_is_gspo():
    # a: g = √1.5 inside 1.3: g·2 = 2.4494897; gradient −g · 2 / 2 tokens / 2 samples = −0.6123724; b held at −0.8.
    loss = ClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.3, length_normalize=True)
    check(loss, batch(), -0.8247449, [-0.6123724, -0.6123724, 0], clip_frac=1 / 3, ratio_mean=(1.2247449 + 0.5) / 2)


def test_sequence_clip_is_tight_by_default():
    # a held at 1.0004·2, b at 0.9997·(−1): −(2.0008 − 0.9997) / 2.
    check(ClippedSurrogateLoss(), batch(), -0.50055, [0, 0, 0], clip_frac=1.0)


def test_sequence_clip_with_a_cap():
    # Weights turned round: a min(1.3·(−2), 1.2·(−2)) = −2.6 at the cap, no gradient; b 0.5·1 free, gradient −0.5 / 2.
    loss = ClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.2, ratio_clip=1.3)
    check(loss, batch(weights=(-2, -2, 1)), (2.6 - 0.5) / 2, [0, 0, -0.25], ratio_clip_frac=0.5, clip_frac=0.0)


# --- CISPO, SAPO, GMPO ----------------------------------------------------------------------------------------


@every_reduction
def test_cispo(reduction):
    # Factors 1.2 (capped), 1, 0.5. −f A ℓ: 2.4, 4, −0.25; every token keeps its gradient −f A: −2.4, −2, 0.5.
    loss = CISPOLoss(**settings(reduction))
    check_reduced(loss, batch(), [2.4, 4, -0.25], [-2.4, -2, 0.5], reduction, clip_frac=1 / 3, ratio_mean=1.0)


def test_cispo_is_a_sample_mean_by_default_and_can_have_a_lower_bound():
    # t2's factor is raised to 0.8: −0.8·(−1)·(−0.5) = −0.4. a (2.4 + 4) / 2 = 3.2; loss (3.2 − 0.4) / 2.
    check(CISPOLoss(clip_eps_low=0.2), batch(), 1.4, [-0.6, -0.5, 0.4], clip_frac=2 / 3)


@every_reduction
def test_sapo(reduction):
    # τ chosen so that the gates are fractions: τ₊ = 2 ln 3, so p(t0) = σ(0.5 τ₊) = σ(ln 3) = 3/4 and p(t1) = σ(0) = 1/2;
    # τ₋ = 2 ln 4, so p(t2) = σ(−ln 4) = 1/5.
    # Values −(4/τ) p A: t0 −6/τ₊ = −3/ln 3; t1 −4/τ₊ = −2/ln 3; t2 (4/5)/τ₋ = 0.4/ln 4.
    # Gradients −4 p (1 − p) ρ A: t0 −4·(3/16)·1.5·2 = −2.25; t1 −2; t2 4·(4/25)·0.5 = 0.32.
    loss = SAPOLoss(tau_pos=2 * log(3), tau_neg=2 * log(4), **settings(reduction))
    values = [-3 / log(3), -2 / log(3), 0.4 / log(4)]
    check_reduced(
        loss, batch(), values, [-2.25, -2, 0.32], reduction, grad_weight_mean=(0.75 + 1 + 0.64) / 3, ratio_mean=1.0
    )


def test_sapo_defaults():
    # σ(0.5) = 0.6224593; σ(−1.05 · 0.5) = 1 / (1 + e^0.525) = 1 / 2.6904588 = 0.3716838.
    # t0 −4·0.6224593·2 = −4.9796747; t1 −4; t2 4/1.05·0.3716838 = 1.4159384. Sum −7.5637363, sum over 2 samples.
    # Gradients: −4·0.6224593·0.3775407·1.5·2 = −2.8200445; −2; 4·0.3716838·0.6283162·0.5 = 0.4670698.
    check(SAPOLoss(), batch(), -3.7818681, [-1.4100223, -1, 0.2335349])


def test_gmpo():
    # a: ln 1.5 held at 0.4, and 0: g = e^{0.2} = 1.2214028; only t1 has a gradient: −g · 2 / 2 tokens / 2 samples.
    # b: −ln 2 held at −0.4: e^{−0.4} = 0.6703200, no gradient. Loss −(2.4428055 − 0.6703200) / 2.
    check(
        GMPOLoss(), batch(), -0.8862427, [0, -0.6107014, 0],
        clip_frac=2 / 3, geom_mean_ratio_mean=(1.2214028 + 0.67032) / 2, ratio_clip_frac=0.0,
    )  # fmt: skip


def test_gmpo_without_length_normalisation_sums_log_ratios():
    # a: e^{0.4} = 1.4918247; gradient of t1 −1.4918247 · 2 / 2 samples. Loss −(2.9836494 − 0.6703200) / 2.
    check(GMPOLoss(length_normalize=False), batch(), -1.1566647, [0, -1.4918247, 0])


def test_gmpo_holds_positive_weights_at_the_upper_and_negative_ones_at_the_lower_bound():
    # High 0.5: a is free, √1.5 · 2 = 2.4494897, gradient −√1.5 · 2 / 4. Low 0.1: b held at e^{−0.1} = 0.9048374.
    loss = GMPOLoss(clip_eps_low=0.1, clip_eps_high=0.5)
    check(loss, batch(), -0.7723262, [-0.6123724, -0.6123724, 0], clip_frac=1 / 3)


def test_gmpo_leaves_log_ratios_that_went_the_wrong_way():
    # Weights turned round: a −2·√1.5 with gradient +0.6123724 each; b 1·0.5, gradient −0.5 / 2. Loss (2.4494897 − 0.5) / 2.
    check(GMPOLoss(), batch(weights=(-2, -2, 1)), 0.9747449, [0.6123724, 0.6123724, -0.25], clip_frac=0.0)


def test_gmpo_with_a_cap():
    # g of a, 1.2214028, is capped at 1.1: no gradient. Loss −(2.2 − 0.6703200) / 2.
    check(GMPOLoss(ratio_clip=1.1), batch(), -0.76484, [0, 0, 0], ratio_clip_frac=0.5)


# --- supervised -----------------------------------------------------------------------------------------------


@every_reduction
def test_masked_cross_entropy(reduction):
    # −A ℓ: 2, 4, −0.5; gradient −A. No sampler's log-probs needed. Mean of −ℓ: 3.5 / 3.
    loss = MaskedCausalLMCrossEntropyLoss(**settings(reduction))
    check_reduced(loss, batch(old_logps=None), [2, 4, -0.5], [-2, -2, 1], reduction, nll_mean=3.5 / 3)


# --- KL -------------------------------------------------------------------------------------------------------

KL_TERMS = {
    # d ℓ; gradient d
    "k1": ([-LN_1_5, 0, 0.5 * LN_2], [LN_1_5, 0, -LN_2]),
    # d² / 2: 0.1644020 / 2, 0, 0.4804530 / 2; gradient d
    "k2": ([0.0822009769, 0, 0.2402265070], [LN_1_5, 0, -LN_2]),
    # e^{−d} − 1 + d: 2/3 − 1 + 0.4054651, 0, 2 − 1 − 0.6931472; gradient 1 − e^{−d}: 1/3, 0, −1
    "k3": ([0.0721317748, 0, 0.3068528194], [1 / 3, 0, -1]),
}


@every_reduction
@pytest.mark.parametrize("estimator", list(KL_TERMS))
def test_token_kl_to_the_actor(estimator, reduction):
    loss = TokenKLLoss(estimator=estimator, **settings(reduction))
    check_reduced(loss, batch(), *KL_TERMS[estimator], reduction, kl_mean=(0.0721317748 + 0.3068528194) / 3)


@pytest.mark.parametrize("estimator", list(KL_TERMS))
def test_token_kl_to_the_reference_does_not_look_at_the_actor(estimator):
    # The same d, now to the reference; coefficient 0.5; default reduction: mean of a's two tokens, then of two samples.
    tokens = batch(old_logps=None, ref_logps=batch().old_logps)
    (t0, t1, t2), (g0, g1, g2) = KL_TERMS[estimator]
    loss = TokenKLLoss(coeff=0.5, to="reference", estimator=estimator)
    check(loss, tokens, 0.5 * ((t0 + t1) / 4 + t2 / 2), [g0 / 8, g1 / 8, g2 / 4])


SAMPLE_KL = {
    # D = ln 1.5 and −ln 2 on L = −3 and −0.5. D·L: −1.2163953, 0.3465736; gradient D.
    "k1": ((-1.2163953243 + 0.3465735903) / 2, [LN_1_5 / 2, LN_1_5 / 2, -LN_2 / 2]),
    "k2": ((0.0822009769 + 0.2402265070) / 2, [LN_1_5 / 2, LN_1_5 / 2, -LN_2 / 2]),
    "k3": ((0.0721317748 + 0.3068528194) / 2, [1 / 6, 1 / 6, -1 / 2]),
}


@pytest.mark.parametrize("to", ["actor", "reference"])
@pytest.mark.parametrize("estimator", list(SAMPLE_KL))
def test_sample_kl(estimator, to):
    tokens = batch() if to == "actor" else batch(old_logps=None, ref_logps=batch().old_logps)
    value, gradient = SAMPLE_KL[estimator]
    check(KLLoss(estimator=estimator, to=to), tokens, value, gradient, kl_mean=(LN_1_5 - LN_2) / 2)


def test_sample_kl_length_normalised():
    # a: D = ln 1.5 / 2 = 0.2027326, D² / 2 = 0.0205502, gradient D / 2 tokens / 2 samples. b as before.
    loss = KLLoss(length_normalize=True)
    check(loss, batch(), (0.0205502442 + 0.2402265070) / 2, [LN_1_5 / 8, LN_1_5 / 8, -LN_2 / 2])


REF = (-0.3, 0.4, 0.2)
"""d = ℓ − ℓ_ref of t0, t1, t2."""
VALUES = {
    "k1": REF,
    "k2": [d * d / 2 for d in REF],
    "k3": [exp(-d) - 1 + d for d in REF],
}


@every_reduction
@pytest.mark.parametrize("estimator", list(VALUES))
def test_weighted_token_kl_to_the_reference(estimator, reduction):
    # ρ = 1.5, 1, 0.5. Value ρ k(d), gradient ρ d, of all three estimators.
    tokens = batch(ref_logps=f64(-1, -2, -0.5) - f64(*REF))
    loss = TokenKLLoss(to="reference", estimator=estimator, importance_weighted=True, **settings(reduction))
    values = [ratio * value for ratio, value in zip((1.5, 1, 0.5), VALUES[estimator], strict=True)]
    check_reduced(loss, tokens, values, [1.5 * -0.3, 0.4, 0.5 * 0.2], reduction)


def test_weighted_kl_with_a_cap():
    tokens = batch(ref_logps=f64(-1, -2, -0.5) - f64(*REF))
    loss = TokenKLLoss(
        coeff=2, to="reference", estimator="k1", reduction="token_mean", importance_weighted=True, weight_cap=1.2
    )
    check(loss, tokens, 2 * (1.2 * -0.3 + 0.4 + 0.5 * 0.2) / 3, [-0.24, 0.8 / 3, 0.2 / 3])


@pytest.mark.parametrize("estimator", list(VALUES))
def test_weighted_sample_kl(estimator):
    # D = 0.1 of a with the ratio 1.5, and 0.2 of b with 0.5; gradients ρ D on every token of the sample, over two samples.
    tokens = batch(ref_logps=f64(-1, -2, -0.5) - f64(*REF))
    value = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: exp(-d) - 1 + d}[estimator]
    loss = KLLoss(to="reference", estimator=estimator, importance_weighted=True)
    check(loss, tokens, (1.5 * value(0.1) + 0.5 * value(0.2)) / 2, [0.075, 0.075, 0.05], kl_mean=0.15)


def test_weighted_k3_has_the_gradient_that_goes_through_its_ratio():
    tokens = batch(ref_logps=f64(-1, -2, -0.5) - f64(*REF))
    d = tokens.logps - tokens.ref_logps
    ((tokens.logps - tokens.old_logps).exp() * ((-d).exp() - 1 + d)).sum().backward()
    by_hand = tokens.logps.grad.clone()
    tokens.logps.grad = None
    TokenKLLoss(to="reference", reduction="sample_sum", importance_weighted=True)(tokens)[0].backward()
    torch.testing.assert_close(2 * tokens.logps.grad, by_hand)


# --- decoupled ------------------------------------------------------------------------------------------------


@every_reduction
def test_decoupled_clip(reduction):
    # Proximal / sampled: 3, 1.25, 0.4, capped at 2: 2, 1.25, 0.4. Trained / proximal: 0.5, 0.8, 1.25 against a clip of 0.7 … 1.2.
    # Weights 4, 2.5, −0.4. Objectives: 0.5 · 4 (free: pushed up, has gone down), 0.8 · 2.5, 1.25 · −0.4 (free: brought back).
    tokens = batch(ratios=(1.5, 1.0, 0.5), proximal_logps=f64(-1, -2, -0.5) - f64(0.5, 0.8, 1.25).log())
    loss = TokenClippedSurrogateLoss(clip_eps_low=0.3, behavior_cap=2.0, **settings(reduction))
    terms = [-2.0, -2.0, 0.5]
    check_reduced(
        loss, tokens, terms, terms, reduction,
        behavior_weight_mean=(3 + 1.25 + 0.4) / 3, behavior_capped_frac=1 / 3, clip_frac=0.0, ratio_mean=2.55 / 3,
    )  # fmt: skip


def test_decoupled_clip_is_around_the_proximal_policy():
    # Trained / proximal: 1.5, 1, 0.5, beyond 0.8 … 1.2 for t0 and t2; trained / sampled is 1 everywhere, where PPO clips nothing.
    proximal = f64(-1, -2, -0.5) - f64(1.5, 1, 0.5).log()
    tokens = batch(ratios=(1, 1, 1), proximal_logps=proximal)
    # Proximal / sampled 2/3, 1, 2. t0: 1.2 · 2 · 2/3 = 1.6 and no gradient; t1: 2; t2: 0.8 · −1 · 2 and no gradient.
    loss = TokenClippedSurrogateLoss(behavior_cap=5.0, reduction="token_mean")
    check(loss, tokens, -(1.6 + 2 - 1.6) / 3, [0, -2 / 3, 0], clip_frac=2 / 3)


def test_decoupled_clip_where_sampler_and_proximal_policy_are_one_is_the_clip():
    tokens = batch()
    check(
        TokenClippedSurrogateLoss(behavior_cap=2.0), replace(tokens, proximal_logps=tokens.old_logps), -1.8, [0, -1, 0]
    )
    check(TokenClippedSurrogateLoss(), batch(), -1.8, [0, -1, 0])


# --- entropy and value ----------------------------------------------------------------------------------------


def test_entropy_bonus_is_a_token_mean():
    entropy = f64(1.0, 0.5, 1.5).requires_grad_()
    loss, stats = EntropyBonus(coeff=0.3)(batch(entropy=entropy, old_logps=None))
    loss.backward()
    # −0.3 · (1 + 0.5 + 1.5) / 3; each token's share −0.3 / 3
    assert loss.item() == pytest.approx(-0.3)
    assert entropy.grad.tolist() == pytest.approx([-0.1] * 3)
    assert means(stats) == pytest.approx({"entropy_mean": 1.0})


@pytest.mark.parametrize(
    ("clip_eps", "value", "gradient", "error"),
    [
        # t0 V has moved 0.5 from 0.5, held at 0.7: max(0.25, 0.64), held. t1 moved 0.1: (2 − 1)². t2 moved −0.1: 0.2².
        # 0.5 · ½ · (0.64 + 1 + 0.04) / 3 = 0.14; gradients 0.5 · (V − R) / 3: 0, 1/6, −1/30.
        (0.2, 0.14, [0, 1 / 6, -1 / 30], 0.56),
        # Free: 0.5 · ½ · (0.25 + 1 + 0.04) / 3 = 0.1075; t0 0.5 · (−0.5) / 3 = −1/12.
        (None, 0.1075, [-1 / 12, 1 / 6, -1 / 30], 0.43),
    ],
)
def test_value_loss(clip_eps, value, gradient, error):
    values = f64(1.0, 2.0, 0.0).requires_grad_()
    tokens = batch(values=values, returns=f64(1.5, 1.0, 0.2), old_values=f64(0.5, 1.9, 0.1), old_logps=None)
    loss, stats = ValueLoss(clip_eps=clip_eps)(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert values.grad.tolist() == pytest.approx(gradient)
    assert means(stats) == pytest.approx({"value_mean": 1.0, "return_mean": 0.9, "value_error": error})


def test_value_clip_keeps_the_gradient_that_brings_a_value_back():
    # V = 2 left 0 although R = −1: (2 + 1)² = 9 > (0.2 + 1)², so the free error counts; gradient 1 · (2 + 1) / 3 for t0.
    values = f64(2.0, 0.0, 0.0).requires_grad_()
    tokens = batch(values=values, returns=f64(-1.0, 0.0, 0.0), old_values=f64(0.0, 0.0, 0.0))
    loss, _ = ValueLoss(coeff=1.0)(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(1.5) and values.grad.tolist() == pytest.approx([1.0, 0.0, 0.0])


# --- around other losses --------------------------------------------------------------------------------------


@every_reduction
def test_batch_normalised_weights(reduction):
    # (A − 0.5) / 1.5 = 1, 1, −1. t0 held at 1.2, t1 1 free, t2 held at −0.8.
    loss = BatchNormalized(TokenClippedSurrogateLoss(**settings(reduction)))
    check_reduced(loss, batch(), [-1.2, -1, 0.8], [0, -1, 0], reduction, adv_mean=0.0, adv_abs_mean=1.0)


@pytest.mark.parametrize("loss", [BatchNormalized(ReinforceLoss()), ReinforceBaselineLoss(normalize=True)])
def test_equal_weights_with_rounding_errors_are_not_scaled_up(loss):
    low = torch.tensor(0.7)
    weights = torch.stack([low, torch.nextafter(low, torch.tensor(1.0))])
    items = [SAWItem([1, 2], None, [0, 1], float(weight)) for weight in weights]
    facts = batch_facts(items)
    tokens = ActionTokens(
        logps=torch.zeros(2, requires_grad=True), weights=weights, item_index=torch.arange(2), num_items=2, facts=facts,
        old_logps=torch.zeros(2),
    )  # fmt: skip
    loss(tokens)[0].backward()
    assert tokens.logps.grad.abs().max() < 1e-6
    padded = {"input_ids": torch.tensor([[1, 2]] * 2), "action_mask": torch.tensor([[0, 1]] * 2), "weight": weights,
              "actor_logps": torch.zeros(2, 2)}  # fmt: skip
    logits = torch.zeros(2, 2, 4, requires_grad=True)
    loss.compute(logits, padded)[0].backward()
    assert logits.grad.abs().max() < 1e-6


def test_a_composite_is_the_weighted_sum_of_its_terms():
    # Policy: −1.8 with gradient (0, −1, 0), see test_token_clip. KL k3, token mean, coefficient 0.3:
    # 0.1 · (0.0721318 + 0.3068528) = 0.0378985, gradient 0.1 · (1/3, 0, −1). Together with weights 1 and 2.
    loss = CompositeLoss(
        [
            LossTerm(name="policy", loss=TokenClippedSurrogateLoss()),
            LossTerm(name="kl", loss=TokenKLLoss(coeff=0.3, reduction="token_mean"), weight=2.0),
        ]
    )
    stats = {"policy/loss": -1.8, "kl/loss": 0.0378984594, "policy/clip_frac": 2 / 3, "kl/kl_mean": 0.1263282}
    check(loss, batch(), -1.8 + 2 * 0.0378984594, [2 / 30, -1, -0.2], **stats)


@pytest.mark.parametrize(
    ("corrections", "factors"),
    [
        ([TokenTruncation(1.2)], [1.2, 1, 0.5]),
        ([SequenceTruncation(1.2)], [1.2, 1.2, 0.5]),
        ([SequenceTruncation(2.0)], [1.5, 1.5, 0.5]),
        ([TokenRejection(1.2)], [0, 1, 0.5]),
        ([TokenRejection(1.6)], [1.5, 1, 0.5]),
        ([SequenceRejection(1.2)], [0, 0, 0.5]),
        ([SequenceRejection(1.6)], [1.5, 1.5, 0.5]),
        ([TokenMask(0.4, 1.4)], [0, 1, 1]),
        ([TokenMask(0.6, 1.6)], [1, 1, 0]),
        ([SequenceMask(0.6, 1.3)], [1, 1, 0]),  # a's geometric mean is 1.22; its product 1.5 would be outside
        ([SequenceMask(0.4, 1.2)], [0, 0, 1]),
        ([TokenMask(0.4, 1.4), SequenceTruncation(2.0)], [0, 1.5, 0.5]),
        ([SequenceMask(0.6, 1.3), TokenTruncation(1.2)], [1.2, 1, 0]),  # geometric rejection, then token truncation
        # Of negative weight is only b; its mean log(sampled / trained) is ln 2 = 0.693. a would be dropped by a gap of −0.2 at most.
        ([NegativeSequenceMask(0.7)], [1, 1, 1]),
        ([NegativeSequenceMask(0.69)], [1, 1, 0]),
        # π = e^ℓ = 0.368, 0.135, 0.607 and μ = π / ρ = 0.245, 0.135, 1.213 (the table is no distribution): |π − μ| = 0.123, 0, 0.607.
        ([DivergenceMask(0.1)], [0, 1, 0]),
        ([DivergenceMask(0.2)], [1, 1, 0]),
        ([DivergenceMask(0.7)], [1, 1, 1]),
        ([], [1, 1, 1]),
    ],
)
def test_corrections_multiply_the_weights(corrections, factors):
    # Inside is cross-entropy, −A ℓ = 2, 4, −0.5 and gradient −A = −2, −2, 1, summed over 2 samples.
    inner = MaskedCausalLMCrossEntropyLoss(length_normalize=False)
    f0, f1, f2 = factors
    check(
        CorrectedLoss(inner, corrections), batch(), (2 * f0 + 4 * f1 - 0.5 * f2) / 2, [-f0, -f1, f2 / 2],
        correction_mean=(f0 + f1 + f2) / 3, correction_zero_frac=factors.count(0) / 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("correction", "capped", "ess"),
    [
        (TokenTruncation(1.2), 1 / 3, 2.7**2 / (3 * (1.2**2 + 1 + 0.5**2))),
        (SequenceTruncation(1.2), 2 / 3, 2.9**2 / (3 * (2 * 1.2**2 + 0.5**2))),
        (TokenTruncation(2.0), 0.0, 9 / (3 * 3.5)),
        (TokenRejection(1.2), 0.0, 1.5**2 / (3 * 1.25)),  # what is rejected is zero, and not capped
        (SequenceMask(0.6, 1.3), 0.0, 2 / 3),
    ],
)
def test_corrections_report_capped_and_zero_fractions(correction, capped, ess):
    _, reported = CorrectedLoss(MaskedCausalLMCrossEntropyLoss(), [correction])(batch())
    stats = effective_sample_size(means({f"rl/{name}": pair for name, pair in reported.items()}))
    assert stats["rl/correction_capped_frac"] == pytest.approx(capped)
    assert stats["rl/correction_ess"] == pytest.approx(ess)
    assert "rl/correction_square_mean" not in stats


def test_corrections_carry_no_gradient():
    # If the factor 1.5 of t0 were differentiated, its gradient would have −1.5 · A ℓ more.
    loss = CorrectedLoss(MaskedCausalLMCrossEntropyLoss(length_normalize=False), [TokenTruncation(9.0)])
    check(loss, batch(), (2 * 1.5 + 4 - 0.25) / 2, [-1.5, -1, 0.25])


@pytest.mark.parametrize("inner", [BatchNormalized(ReinforceLoss()), ReinforceBaselineLoss(normalize=True)])
def test_what_a_correction_masks_stays_masked_when_weights_are_centred(inner):
    # b is masked. a's weight is (2 − 0.5) / 1.5 = 1 and its ratio 1.5: −1.5 ℓ = 1.5 + 3; gradient −1.5 / 2.
    # Centring the masked weight, (0 − 0.5) / 1.5, would have trained on b with −1/3.
    check(CorrectedLoss(inner, [SequenceMask(0.6, 1.3)]), batch(), 2.25, [-0.75, -0.75, 0])


@pytest.mark.parametrize(
    ("weights", "ratios", "factors"),
    [
        ((1.0, -1.0, 0.0), (1.5, 1.5, 1.5), [0, 1, 1]),  # has gone up, and only the first is pushed on
        ((1.0, -1.0, 0.0), (0.5, 0.5, 0.5), [1, 0, 1]),
        ((1.0, -1.0, 0.0), (1.0, 1.0, 1.0), [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_divergence_mask_drops_only_what_is_pushed_farther_away(kind, weights, ratios, factors):
    tokens = batch(ratios, weights)
    assert DivergenceMask(1e-3, kind).factors(tokens).tolist() == factors


def test_divergence_is_that_of_this_token_or_another():
    # μ = 0.2, π = 0.3 for t0: KL = 0.2 ln(2/3) + 0.8 ln(8/7) = −0.0810930 + 0.1068251; total variation 0.1.
    logps, old = f64(log(0.3), log(1e-9), log(0.9)), f64(log(0.2), log(1e-6), log(0.5))
    facts = BatchFacts(num_items=1, num_tokens=3)
    tokens = ActionTokens(
        logps=logps, weights=f64(1, -1, 1), item_index=torch.zeros(3, dtype=torch.int64), num_items=1, facts=facts, old_logps=old
    )  # fmt: skip
    assert DivergenceMask(0.0257, "kl").factors(tokens).tolist() == [0, 1, 0]
    assert DivergenceMask(0.0258, "kl").factors(tokens).tolist() == [1, 1, 0]
    # A ratio of 1/1000 is far outside of any clip; of a token this rare it moves nothing.
    assert DivergenceMask(0.099, "tv").factors(tokens).tolist() == [0, 1, 0]
    assert DivergenceMask(0.101, "tv").factors(tokens).tolist() == [1, 1, 0]


def test_divergence_mask_around_an_unclipped_ratio_is_dppo():
    # −ρ A: −3, −2, 0.5; t2 masked. Gradients −ρ A of t0 and t1, over 3 tokens.
    free = TokenClippedSurrogateLoss(clip_eps_low=1e6, clip_eps_high=1e6, reduction="token_mean")
    check(CorrectedLoss(free, [DivergenceMask(0.2)]), batch(), -5 / 3, [-1, -2 / 3, 0])


def test_mismatch_between_sampler_and_trainer():
    # ρ − 1 − ln ρ: 0.5 − 0.4054651, 0, −0.5 + 0.6931472. Ratios 1.5, 1, 0.5: mean 1, mean square 3.5 / 3, so ess = 6/7.
    # Samples' ratios 1.5, 0.5: mean 1, mean square 1.25. Of a's two tokens the first lies in the first quarter, the second in
    # the third; b's only token is in the first.
    stats = effective_sample_size(means(mismatch_stats(batch())))
    expected = {
        "kl_actor_policy": (0.0945348919 + 0.1931471806) / 3,
        "kl_actor_policy_k1": (LN_2 - LN_1_5) / 3,
        "kl_actor_policy_q1": (0.0945348919 + 0.1931471806) / 2,
        "kl_actor_policy_q3": 0.0,
        "logp_difference_abs": (LN_1_5 + LN_2) / 3,
        "ratio_token_mean": 1.0,
        "ratio_geometric_mean": (sqrt(1.5) + 0.5) / 2,
        "ess": 6 / 7,
        "ratio_sequence_mean": 1.0,
        "ess_sequence": 0.8,
        # (ρ − 1)²: 0.25, 0, 0.25 by token; 0.25, 0.25 by sample.
        "chi_square": 0.5 / 3,
        "chi_square_sequence": 0.25,
        # Mean of −ln ρ: −ln 1.5 / 2 and ln 2.
        "log_perplexity_gap": (LN_2 - LN_1_5 / 2) / 2,
        "log_perplexity_gap_abs": (LN_2 + LN_1_5 / 2) / 2,
    }
    assert stats == pytest.approx(expected, rel=1e-6)
    assert mismatch_stats(batch(old_logps=None)) == {}


def test_mismatch_is_reported_by_quarter_of_a_sample():
    # Eight tokens of a and four of b, entangled; only a's last two (fourth quarter) have another ratio than 1.
    index = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0])
    old = torch.zeros(12)
    old[[9, 11]] = LN_2
    facts = BatchFacts(num_items=2, num_tokens=12)
    tokens = ActionTokens(
        logps=torch.zeros(12), weights=torch.ones(12), item_index=index, num_items=2, facts=facts, old_logps=old
    )
    stats = mismatch_stats(tokens)
    assert [float(stats[f"kl_actor_policy_q{q}"][1]) for q in (1, 2, 3, 4)] == [3, 3, 3, 3]
    assert [float(stats[f"kl_actor_policy_q{q}"][0]) for q in (1, 2, 3, 4)] == pytest.approx(
        [0, 0, 0, 2 * (LN_2 - 0.5)]
    )


def test_the_ratios_of_the_batch_are_those_of_the_table():
    # Guards the table above: everything in this file is derived from it.
    tokens = batch()
    assert [exp(d) for d in (tokens.logps - tokens.old_logps).tolist()] == pytest.approx([1.5, 1.0, 0.5])
