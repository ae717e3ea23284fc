"""KL over the vocabulary by hand and against plain autograd: value and gradient, whole and top-k, in chunks of any size."""

from math import log

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ludic.models import teacher_kl as module
from ludic.models.head import Head
from ludic.models.teacher_kl import KLDirection, VocabularyKL, vocabulary_kl
from ludic.training.losses import ActionTokens, BatchFacts, CorrectedLoss, DistillationLoss, TokenMask
from ludic.types import ConfigError

REVERSE, FORWARD = KLDirection.REVERSE, KLDirection.FORWARD
STUDENT, TEACHER = [1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2]


def by_probabilities(student, teacher, how):
    """KL and gradient with respect to the logits of one position, whose logits are the hidden state itself."""
    logits = torch.tensor([student]).log().requires_grad_()
    eye = Head(torch.eye(len(student)))
    kl = vocabulary_kl(logits, eye, torch.tensor([teacher]).log(), eye, torch.ones(1), how)
    kl.sum().backward()
    return kl.item(), logits.grad[0].tolist()


def test_the_reverse_kl_by_hand():
    # ½ log 2 + ¼ log 1 + ¼ log ½ = ¼ log 2; its slope is p (log p/q − KL).
    kl, grad = by_probabilities(STUDENT, TEACHER, VocabularyKL(REVERSE))
    assert kl == pytest.approx(log(2) / 4)
    assert grad == pytest.approx([0.5 * 0.75 * log(2), -0.25 * 0.25 * log(2), -0.25 * 1.25 * log(2)])


def test_the_forward_kl_by_hand():
    # ¼ log ½ + ¼ log 1 + ½ log 2 = ¼ log 2; its slope is p − q.
    kl, grad = by_probabilities(STUDENT, TEACHER, VocabularyKL(FORWARD))
    assert kl == pytest.approx(log(2) / 4)
    assert grad == pytest.approx([0.25, 0.0, -0.25])


def test_the_likeliest_token_against_all_others_by_hand():
    # The teacher's likeliest is the last: ¼ against ½; the others are ¾ against ½ together.
    kl, grad = by_probabilities(STUDENT, TEACHER, VocabularyKL(REVERSE, top_k=1))
    expected = 0.25 * log(1 / 2) + 0.75 * log(3 / 2)
    assert kl == pytest.approx(expected)
    # p (log P/Q of its bucket − KL): the others share their bucket's pull by how likely they are.
    slopes = [0.5 * (log(3 / 2) - expected), 0.25 * (log(3 / 2) - expected), 0.25 * (log(1 / 2) - expected)]
    assert grad == pytest.approx(slopes)
    kl, grad = by_probabilities(STUDENT, TEACHER, VocabularyKL(FORWARD, top_k=1))
    assert kl == pytest.approx(0.5 * log(2) + 0.5 * log(2 / 3))
    # p − Q · p/P within each bucket
    assert grad == pytest.approx([0.5 - 0.5 * 2 / 3, 0.25 - 0.5 / 3, 0.25 - 0.5])


# --- against plain autograd ---

A, D, E, V = 11, 6, 4, 37


def layer_of(weight):
    """An output layer with a bias, as Phi has one."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight
    return layer


def test_output_biases_are_part_of_both_distributions():
    hidden, head, teacher_hidden, teacher_head, scale = drawn()
    torch.manual_seed(0)
    student, teacher = layer_of(head.source.detach()), layer_of(teacher_head.source)
    kl = vocabulary_kl(hidden, Head(student), teacher_hidden, Head(teacher), scale, VocabularyKL(REVERSE))
    p, q = (torch.log_softmax(logits * scale[:, None], -1) for logits in (student(hidden), teacher(teacher_hidden)))
    plain = (p.exp() * (p - q)).sum(-1)
    changed = hidden, student.weight, student.bias
    torch.testing.assert_close(kl, plain, rtol=1e-4, atol=1e-5)
    found, expected = (torch.autograd.grad(value.square().sum(), changed) for value in (kl, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def drawn(softcap=None):
    """Hidden states and heads of a student and a smaller teacher, and a temperature for each position."""
    draw = torch.Generator().manual_seed(3)
    hidden, teacher_hidden = torch.randn(A, D, generator=draw), torch.randn(A, E, generator=draw)
    weight, teacher_weight = torch.randn(V, D, generator=draw), torch.randn(V, E, generator=draw)
    inverse_temperature = 0.5 + torch.rand(A, generator=draw)
    heads = Head(weight.requires_grad_(), softcap), Head(teacher_weight, softcap)
    return hidden.requires_grad_(), heads[0], teacher_hidden, heads[1], inverse_temperature


def plain_kl(hidden, head, teacher_hidden, teacher_head, scale, how):
    """All logits at once, in the shortest way that autograd follows; the rest of the probability by subtraction."""

    def log_probs(states, of):
        logits = states.double() @ of.source.double().t()
        capped = logits if of.softcap is None else of.softcap * torch.tanh(logits / of.softcap)
        return torch.log_softmax(capped * scale.double()[:, None], -1)

    p, q = log_probs(hidden, head), log_probs(teacher_hidden, teacher_head)
    if how.top_k is not None and how.top_k < V:
        best = q.argsort(-1, descending=True)[:, : how.top_k]
        p, q = p.gather(-1, best), q.gather(-1, best)
        p, q = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1) if how.direction is REVERSE else (q.exp() * (q - p)).sum(-1)


def value_and_gradients(function, arguments, how):
    for tensor in (arguments[0], arguments[1].source):
        tensor.grad = None
    kl = function(*arguments, how)
    (kl * torch.linspace(-1, 2, A)).sum().backward()
    return kl.detach().float(), arguments[0].grad.clone(), arguments[1].source.grad.clone()


@pytest.mark.parametrize("positions_per_chunk", [1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, V, V + 9])
@pytest.mark.parametrize("direction", KLDirection)
def test_value_and_gradient_are_those_of_plain_autograd(monkeypatch, direction, top_k, softcap, positions_per_chunk):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", positions_per_chunk * V)
    arguments, how = drawn(softcap), VocabularyKL(direction, top_k)
    found = value_and_gradients(vocabulary_kl, arguments, how)
    expected = value_and_gradients(plain_kl, arguments, how)
    assert all(float(part.abs().max()) > 0.05 for part in expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made meanwhile holds."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [part.numel() for part in tree_leaves(made) if isinstance(part, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return made


@pytest.mark.parametrize("top_k", [None, 5])
def test_no_tensor_ever_holds_the_logits_of_more_than_a_chunk(monkeypatch, top_k):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 2 * V)
    arguments = drawn()
    with Largest() as plain:
        value_and_gradients(plain_kl, arguments, VocabularyKL(REVERSE, top_k))
    with Largest() as chunked:
        value_and_gradients(vocabulary_kl, arguments, VocabularyKL(REVERSE, top_k))
    assert plain.num_elements == A * V
    assert chunked.num_elements == V * D, "the head's own gradient; two positions' logits are less"


def test_top_k_lowers_the_kl_and_equals_it_at_the_whole_vocabulary():
    arguments = drawn()
    for direction in KLDirection:
        kls = torch.stack([vocabulary_kl(*arguments, VocabularyKL(direction, k)).detach() for k in (1, 4, 16, V)])
        assert (kls[1:] >= kls[:-1] - 1e-6).all() and (kls[0] > 0).all()
        torch.testing.assert_close(kls[-1], vocabulary_kl(*arguments, VocabularyKL(direction)).detach())


def test_a_tiny_rest_probability_still_has_a_gradient():
    # The teacher is sure to eight digits; one minus its probability is 0 in fp32, and the log of that is not a number.
    student, teacher = torch.zeros(1, 3, requires_grad=True), torch.tensor([[20.0, 0.0, 0.0]])
    eye = Head(torch.eye(3))
    kl = vocabulary_kl(student, eye, teacher, eye, torch.ones(1), VocabularyKL(REVERSE, top_k=1))
    kl.sum().backward()
    assert kl.item() == pytest.approx(log(1 / 3) / 3 + 2 / 3 * (log(2 / 3) - (log(2) - 20)), rel=1e-5)
    assert student.grad[0, 0] < -1


def test_incompatible_vocabularies_and_invalid_settings_are_refused():
    three, four = Head(torch.eye(3)), Head(torch.eye(4))
    with pytest.raises(ConfigError, match="has 3 tokens and the teacher 4"):
        vocabulary_kl(torch.zeros(1, 3), three, torch.zeros(1, 4), four, torch.ones(1), VocabularyKL(REVERSE))
    with pytest.raises(ConfigError, match="top_k=0"):
        VocabularyKL(REVERSE, 0)
    with pytest.raises(ConfigError, match="sideways"):
        VocabularyKL("sideways")


# --- the loss ---


def tokens_with(kl, **more):
    return ActionTokens(
        logps=torch.zeros(3),
        weights=torch.tensor([7.0, -7.0, 0.0]),
        item_index=torch.tensor([0, 0, 1]),
        num_items=2,
        facts=BatchFacts(num_items=4, num_tokens=6),
        teacher_kl=kl,
        **more,
    )


@pytest.mark.parametrize(
    ("how", "slopes"),
    [
        ({}, [1 / 8, 1 / 8, 1 / 4]),  # mean over the sample's two tokens, then over the batch's four samples
        ({"length_normalize": False}, [1 / 4, 1 / 4, 1 / 4]),
        ({"reduction": "token_mean", "coeff": 0.5}, [0.5 / 6, 0.5 / 6, 0.5 / 6]),
    ],
)
def test_the_loss_is_the_mean_of_the_kls_whatever_the_tokens_were_credited_with(how, slopes):
    kl = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    loss, stats = DistillationLoss(**how)(tokens_with(kl))
    loss.backward()
    assert kl.grad.tolist() == pytest.approx(slopes)
    assert loss.item() == pytest.approx(sum(s * k for s, k in zip(slopes, [0.5, 1.0, 2.0], strict=True)))
    assert stats["teacher_kl"][0].item() == 3.5 and stats["teacher_kl"][1] == 3


def test_a_correction_weighs_the_tokens():
    # Ratios 1, 4 and 0.9 of the trained policy to the sampler's: the second is outside the band.
    kl = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    tokens = tokens_with(kl, old_logps=-torch.tensor([1.0, 4.0, 0.9]).log())
    loss, stats = CorrectedLoss(DistillationLoss(length_normalize=False), [TokenMask(0.5, 2.0)])(tokens)
    loss.backward()
    assert kl.grad.tolist() == pytest.approx([1 / 4, 0.0, 1 / 4])
    assert stats["teacher_kl"][0].item() == 3.5, "what is reported is not corrected"


def test_a_loss_without_teacher_kl_names_the_trainer_argument():
    with pytest.raises(KeyError, match=r"Trainer\(teacher"):
        DistillationLoss()(tokens_with(None))
