"""On-policy distillation by hand: weights, value, gradient, and that the expected gradient is the reverse KL's.

The last is exact: every reply of a small policy is weighted by its probability.
"""

from itertools import product
from math import exp, log

import pytest
import torch

from ludic.models.head import Head
from ludic.models.teacher_kl import KLDirection, VocabularyKL, vocabulary_kl
from ludic.training.algorithms import make_grpo_opd, make_mopd, make_opd
from ludic.training.credit_assignment import KLCreditModifier
from ludic.training.learner.packing import collate_saw_items
from ludic.types import ActorTokenLogps, ConfigError, SampleAttachments, SAWBatch, SAWItem

PROMPT = 0


def sample(tokens, old, teacher, weight=0.0, **attached):
    """A prompt of one token and a reply, all of which is action."""
    return SAWItem(
        [PROMPT, *tokens],
        None,
        [0] + [1] * len(tokens),
        weight,
        {},
        SampleAttachments(actor_logps=ActorTokenLogps(old), teacher_logps=teacher, **attached),
    )


def only(batch):
    (item,) = batch.items
    return item


# --- weights ---


def test_the_weight_of_a_token_is_how_much_likelier_the_teacher_finds_it():
    # Gaps +1, −2, 0.5, times 0.5, beside a task advantage of 3.
    item = sample([1, 2, 3], old=[-2.0, -1.0, -1.0], teacher=[-1.0, -3.0, -0.5], weight=3.0)
    batch = KLCreditModifier(0.5)(SAWBatch(items=[item], meta={"kept": 1}))
    assert only(batch).token_weights.tolist() == [3.5, 2.0, 3.25]
    assert only(batch).weight == pytest.approx(8.75 / 3)
    assert batch.meta == {"kept": 1, "teacher_kl": pytest.approx(0.5 / 3)}  # −mean(1, −2, 0.5)
    assert item.attachments.token_weights is None, "the batch that was given stays as it was"


@pytest.mark.parametrize(
    ("discount", "weights"), [(0.0, [1.0, -2.0, 0.5]), (0.5, [0.125, -1.75, 0.5]), (1.0, [-0.5, -1.5, 0.5])]
)
def test_with_a_discount_a_token_gets_a_share_of_later_tokens(discount, weights):
    # 0.5: 0.5; −2 + 0.25 = −1.75; 1 − 0.875 = 0.125
    item = sample([1, 2, 3], old=[-2.0, -1.0, -1.0], teacher=[-1.0, -3.0, -0.5])
    assert only(KLCreditModifier(discount=discount)(SAWBatch(items=[item]))).token_weights.tolist() == weights


def test_weights_that_differ_by_token_are_added_to():
    item = sample([1, 2], old=[-1.0, -1.0], teacher=[-2.0, -1.0], weight=1.5, token_weights=[1.0, 2.0])
    assert only(KLCreditModifier()(SAWBatch(items=[item]))).token_weights.tolist() == [0.0, 2.0]


def test_a_baseline_is_the_mean_over_the_tokens_of_the_other_samples():
    # Gaps (1, −2) and (4): the first loses 4, the second −0.5. Task advantages stay.
    one = sample([1, 2], old=[-2.0, -1.0], teacher=[-1.0, -3.0], weight=3.0)
    other = sample([3], old=[-5.0], teacher=[-1.0])
    batch = KLCreditModifier(baseline=True)(SAWBatch(items=[one, other]))
    assert [item.token_weights.tolist() for item in batch.items] == [[0.0, -3.0], [4.5]]
    assert batch.meta == {"teacher_kl": pytest.approx(-1.0)}, "what is logged has no baseline"
    alone = KLCreditModifier(baseline=True)(SAWBatch(items=[one]))
    assert only(alone).token_weights.tolist() == [4.0, 1.0], "one sample has no others"


def test_a_baseline_leaves_the_expected_gradient_as_it_is():
    """Exact: all pairs of replies of two tokens, weighted by their probability under the policy."""
    torch.manual_seed(3)
    logits, teacher = torch.randn(4, 3, dtype=torch.float64), 3 * torch.randn(4, 3, dtype=torch.float64)
    log_p, log_q = logits.log_softmax(-1), teacher.log_softmax(-1)  # row 3: first token; rows 0 to 2: after it
    replies = [((a, b), float(log_p[3, a] + log_p[a, b])) for a, b in product(range(3), repeat=2)]

    def of_reply(tokens, table):
        return [float(table[3, tokens[0]]), float(table[tokens[0], tokens[1]])]

    def score(tokens):
        """[2, 4, 3] gradient of each token's log-probability."""
        made = torch.zeros(2, 4, 3, dtype=torch.float64)
        for place, (row, token) in enumerate(((3, tokens[0]), tokens)):
            made[place, row] = -log_p[row].exp()
            made[place, row, token] += 1
        return made

    def expected_gradient(baseline):
        mean = torch.zeros(4, 3, dtype=torch.float64)
        for (one, log_one), (two, log_two) in product(replies, repeat=2):
            items = [
                sample(tokens, old=of_reply(tokens, log_p), teacher=of_reply(tokens, log_q)) for tokens in (one, two)
            ]
            batch = KLCreditModifier(baseline=baseline)(SAWBatch(items=items))
            gradient = sum(
                (torch.tensor(item.token_weights, dtype=torch.float64)[:, None, None] * score(tokens)).sum(0)
                for item, tokens in zip(batch.items, (one, two), strict=True)
            )
            mean += exp(log_one + log_two) * gradient
        return mean

    plain = expected_gradient(False)
    assert torch.allclose(expected_gradient(True), plain, atol=1e-5)  # weights are float32
    assert float(plain.abs().max()) > 0.1


def test_samples_without_teacher_log_probs_are_refused():
    item = sample([1], old=[-1.0], teacher=None)
    with pytest.raises(ConfigError, match=r"1 of 1 samples .*TeacherAnnotatedBatchSource"):
        KLCreditModifier()(SAWBatch(items=[item]))


@pytest.mark.parametrize("settings", [{"coeff": -1.0}, {"coeff": float("nan")}, {"discount": 1.5}])
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="KLCreditModifier"):
        KLCreditModifier(**settings)


# --- value and gradient ---


def computed(algorithm, logits, item):
    """The algorithm's loss of one sample whose reply is predicted by these logits, [tokens, vocabulary]."""
    prepared = algorithm.preprocess(SAWBatch(items=[item]))
    padded = torch.cat([logits, torch.zeros_like(logits[:1])])[None]  # the row after the last token is not used
    return algorithm.loss.compute(padded, collate_saw_items(prepared.items, pad_token_id=0))[0]


def test_value_and_gradient_of_opd():
    # π = (1/2, 1/4, 1/4), token 1 sampled by a policy that gave it 1/8: ρ = 2, at the cap of 2; the teacher gives it 1/2.
    logits = torch.tensor([[log(2.0), 0.0, 0.0]], requires_grad=True)
    item = sample([1], old=[log(1 / 8)], teacher=[log(1 / 2)])
    loss = computed(make_opd(), logits, item)
    loss.backward()
    factor = 2 * log(4)  # ρ · (log ½ − log ⅛)
    assert loss.item() == pytest.approx(-factor * log(1 / 4), rel=1e-6)
    # ∇ log π(1) = onehot(1) − π
    assert logits.grad[0].tolist() == pytest.approx([factor * 0.5, -factor * 0.75, factor * 0.25], rel=1e-6)


def test_value_and_gradient_of_grpo_opd():
    # On-policy, ρ = 1: −(A + log T − log S); the task says +1, the teacher −log 2.
    logits = torch.tensor([[log(2.0), 0.0, 0.0]], requires_grad=True)
    item = sample([0], old=[log(1 / 2)], teacher=[log(1 / 4)], weight=1.0)
    loss = computed(make_grpo_opd(), logits, item)
    loss.backward()
    weight = 1 - log(2)
    assert loss.item() == pytest.approx(-weight, rel=1e-5)
    assert logits.grad[0].tolist() == pytest.approx([-weight * 0.5, weight * 0.25, weight * 0.25], rel=1e-5)


@pytest.mark.parametrize(("old", "counts"), [(1 / 4, 1.0), (1 / 6, 1.5), (1 / 20, 0.0), (0.9, 0.0)])
def test_mopd_counts_a_token_only_where_its_ratio_lies_in_the_band(old, counts):
    # π = 1/4 for the token: ratios 1 and 1.5 are inside 0.5 … 2, 5 and 0.28 are not.
    logits = torch.tensor([[log(2.0), 0.0, 0.0]], requires_grad=True)
    item = sample([1], old=[log(old)], teacher=[log(1 / 2)], weight=0.25)
    loss = computed(make_mopd(), logits, item)
    loss.backward()
    weight = counts * (0.25 + log(1 / 2) - log(old))
    assert loss.item() == pytest.approx(-weight * log(1 / 4), rel=1e-5, abs=1e-9)
    expected = [weight * 0.5, -weight * 0.75, weight * 0.25]
    assert logits.grad[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


# --- expectation ---

V = 3
GENERATOR = torch.Generator().manual_seed(7)


def table(*shape):
    return torch.randn(*shape, generator=GENERATOR)


STUDENT = table(V), table(V, V)
"""Logits of the first token, and of the second after each first."""
TEACHER = tuple(torch.log_softmax(logits, -1) for logits in (table(V), table(V, V)))


def trainable():
    return tuple(logits.clone().requires_grad_() for logits in STUDENT)


def expected_gradient(algorithm):
    """Over all replies of two tokens, each as likely as the student makes it."""
    first, second = trainable()
    log_first, log_second = (torch.log_softmax(logits, -1).detach() for logits in (first, second))
    total = torch.zeros(())
    for a, b in product(range(V), repeat=2):
        old = [log_first[a].item(), log_second[a, b].item()]
        item = sample([a, b], old=old, teacher=[TEACHER[0][a].item(), TEACHER[1][a, b].item()])
        total = total + exp(sum(old)) * computed(algorithm, torch.stack([first, second[a]]), item)
    total.backward()
    return first.grad, second.grad


def test_the_expected_gradient_of_opd_is_that_of_the_reverse_kl_of_every_token():
    first, second = trainable()
    log_first, log_second = torch.log_softmax(first, -1), torch.log_softmax(second, -1)
    kl_first = (log_first.exp() * (log_first - TEACHER[0])).sum()
    kl_second = (log_second.exp() * (log_second - TEACHER[1])).sum(-1)
    # How often the student gets to each prefix is not what it is taught.
    (kl_first + (log_first.exp().detach() * kl_second).sum()).backward()
    found = expected_gradient(make_opd(length_normalize=False))
    torch.testing.assert_close(found, (first.grad, second.grad), rtol=1e-5, atol=1e-6)
    assert first.grad.abs().max() > 0.05 and second.grad.abs().max() > 0.01, "there is something to compare"


def test_with_discount_one_it_is_that_of_the_reverse_kl_of_whole_replies():
    first, second = trainable()
    log_reply = torch.log_softmax(first, -1)[:, None] + torch.log_softmax(second, -1)
    (log_reply.exp() * (log_reply - TEACHER[0][:, None] - TEACHER[1])).sum().backward()
    found = expected_gradient(make_opd(discount=1.0, length_normalize=False))
    torch.testing.assert_close(found, (first.grad, second.grad), rtol=1e-5, atol=1e-6)


def full_gradient(direction):
    """Of the KL over the vocabulary, at the states that the student gets into, as often as it does."""
    first, second = trainable()
    states = torch.cat([first[None], second])
    identity = Head(torch.eye(V))
    teacher = torch.cat([TEACHER[0][None], TEACHER[1]])
    kl = vocabulary_kl(states, identity, teacher, identity, torch.ones(1 + V), VocabularyKL(direction))
    visits = torch.cat([torch.ones(1), torch.softmax(first, -1).detach()])
    (visits * kl).sum().backward()
    return first.grad, second.grad


def test_the_kl_over_the_vocabulary_has_the_gradient_that_the_sampled_token_has_on_average():
    found = full_gradient(KLDirection.REVERSE)
    torch.testing.assert_close(found, expected_gradient(make_opd(length_normalize=False)), rtol=1e-5, atol=1e-6)
    forward = full_gradient(KLDirection.FORWARD)
    assert not torch.allclose(found[0], forward[0], atol=0.02), "the other direction is another gradient"


@pytest.mark.parametrize(
    "settings", [{"top_k": 4}, {"kl": "reverse", "discount": 0.5}, {"kl": "forward", "clip_eps_high": 0.2}]
)
def test_a_setting_of_the_other_kind_of_kl_is_refused(settings):
    with pytest.raises(ConfigError, match="sampled"):
        make_opd(**settings)


def test_an_unknown_kl_is_refused():
    with pytest.raises(ConfigError, match="sideways"):
        make_opd(kl="sideways")
