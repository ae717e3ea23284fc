"""Tokens drawn under temperature, top-p, top-k and min-p: the trainer gives them the probabilities they were drawn with.

The sampler is the embedded engine, the trainer its own head in chunks, and what both are held against is a plain softmax over
all logits with everything masked out that the sampler ruled out.
"""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.distributed.ranks import Ranks
from ludic.models import head as head_module
from ludic.models.head import CandidateMask, Head, chosen_logps
from ludic.training.learner.frozen import Reference
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.packing import fit_length
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import CompositeLoss, EntropyBonus, LossTerm, ReinforceLoss, TokenKLLoss
from ludic.types import (
    CandidateSets,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
)
from tests.unit.inference.local.tiny_models import make_engine, new_model
from tests.unit.training.samples import item_of

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 14], [3, 3, 8, 20, 41], [60]]
TRUNCATIONS = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.3},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 10, "min_tokens": 3},
]


def trained_model(family="llama", seed=0):
    return new_model(family, seed=seed, initializer_range=0.3).requires_grad_(True)


async def answers(model, **sampling):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(7,), **sampling)
    requests = [
        TokenCompletionRequest(
            model="m", prompt_token_ids=ids, sampling=params, return_=ReturnSpec.for_rl(), seed=number
        )
        for number, ids in enumerate(PROMPTS)
    ]
    try:
        return [response for response, _ in await asyncio.gather(*map(engine.complete_tokens, requests))]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def truncated_items():
    """Samples of three temperatures and all truncations, and one from the whole vocabulary."""
    model = trained_model()
    settings = [(0.7, TRUNCATIONS[0]), (1.0, TRUNCATIONS[1]), (1.3, TRUNCATIONS[3]), (1.0, {})]
    items = []
    for temperature, truncation in settings:
        for number, response in enumerate(asyncio.run(answers(model, temperature=temperature, **truncation))):
            items.append(item_of(response, temperature, weight=0.5 - number))
    return items


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
async def test_with_equal_weights_sampler_and_trainer_agree(temperature, truncation):
    model = trained_model()
    for response in await answers(model, temperature=temperature, **truncation):
        assert response.candidates is not None and response.candidates.lengths.min() >= 1
        policy = TrainedPolicy(model)
        with torch.no_grad():
            logps, _ = policy.logps(policy.batch([item_of(response, temperature)]))
            whole, _ = policy.logps(policy.batch([replace_supports(item_of(response, temperature), None)]))
        np.testing.assert_allclose(logps.numpy(), response.completion_logprobs, atol=1e-5)
        assert (logps - whole).max() > 0.01, "what was ruled out had probability"


def replace_supports(item, candidates):
    return replace(item, attachments=replace(item.attachments, candidates=candidates))


async def test_a_request_for_the_whole_vocabulary_records_nothing():
    for sampling in ({"temperature": 1.3}, {"temperature": 0.0, "top_k": 5}):
        assert all(response.candidates is None for response in await answers(trained_model(), **sampling))


async def test_a_truncation_without_effect_is_the_whole_vocabulary():
    (response, *_) = await answers(trained_model(), temperature=1.0, top_k=10_000)
    assert response.candidates.lengths.tolist() == [0] * len(response.completion_token_ids)


# --- the head against a plain masked softmax ---


def ragged(rows, vocab):
    """CandidateMask on a device, and the mask that they stand for."""
    joined = CandidateSets.of(rows)
    device = CandidateMask(
        torch.from_numpy(joined.ids.astype(np.int64)),
        torch.from_numpy(np.repeat(np.arange(len(rows)), joined.lengths)),
        (0, *joined.ends.tolist()),
    )
    mask = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for number, ids in enumerate(rows):
        mask[number, list(ids) or slice(None)] = True
    return device, mask


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_value_and_gradient_are_those_of_a_full_softmax_with_a_mask(softcap, chunk, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    vocab, width, rows = 13, 6, [[1, 4], [], [0, 2, 5, 12], [7], [3, 4, 5, 6, 7, 8], []]
    targets = torch.tensor([4, 11, 12, 7, 3, 0])
    scale = 1 / torch.tensor([0.7, 1.0, 1.3, 1.0, 0.5, 2.0])
    hidden = torch.randn(len(rows), width, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, width, generator=generator, requires_grad=True)
    up_logp, up_entropy = torch.randn(len(rows), generator=generator), torch.randn(len(rows), generator=generator)
    candidates, mask = ragged(rows, vocab)

    logits = hidden @ weight.t()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (capped * scale[:, None]).masked_fill(~mask, -1e30).log_softmax(-1)
    expected_logp = log_probs.gather(-1, targets[:, None])[:, 0]
    expected_entropy = -torch.where(mask, log_probs.exp() * log_probs, 0.0).sum(-1)
    expected = torch.autograd.grad((expected_logp * up_logp + expected_entropy * up_entropy).sum(), [hidden, weight])

    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", chunk * vocab)
    logps, entropy = chosen_logps(hidden, Head(weight, softcap), targets, scale, entropy="train", candidates=candidates)
    found = torch.autograd.grad((logps * up_logp + entropy * up_entropy).sum(), [hidden, weight])
    torch.testing.assert_close(logps, expected_logp)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert logps[3] == 0 and entropy[3] == 0, "the only candidate is certain"


# --- a batch ---

LOSS = CompositeLoss(
    [
        LossTerm(name="policy", loss=ReinforceLoss()),
        LossTerm(name="entropy", loss=EntropyBonus(coeff=0.1)),
        LossTerm(name="kl", loss=TokenKLLoss(coeff=0.3, to="reference")),
    ]
)


class OneShareOfTwo(Ranks):
    """A rank beside another that has a micro-batch more."""

    def max(self, value):
        return value + 1


def gradient(items, *, packed=True, budget=4096, ranks=None):
    model = trained_model()
    reference = Reference(TrainedPolicy(trained_model(seed=1).requires_grad_(False), packed=packed))
    sums = accumulate_gradients(
        TrainedPolicy(model, packed=packed), LOSS, items, micro_token_budget=budget, reference=reference, ranks=ranks
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sums.means()


@pytest.mark.parametrize("how", [{"budget": 14}, {"budget": 30}, {"packed": False, "budget": 30}], ids=str)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(truncated_items, how):
    expected, whole = gradient(truncated_items)
    found, stats = gradient(truncated_items, **how)
    assert whole["logp_difference_abs"] < 1e-5
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4)
    assert stats["policy/logp_mean"] == pytest.approx(whole["policy/logp_mean"], rel=1e-5)


def test_a_rank_takes_them_from_another_and_waits_for_it_with_nothing(truncated_items):
    expected, _ = gradient(truncated_items)
    arrived = pickle.loads(pickle.dumps(truncated_items))
    for name, value in gradient(arrived, ranks=OneShareOfTwo())[0].items():
        torch.testing.assert_close(expected[name], value, atol=2e-5, rtol=1e-4)


def test_the_gradient_does_not_depend_on_the_heads_chunks(truncated_items, monkeypatch):
    expected, _ = gradient(truncated_items)
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", 5 * 128)
    for name, value in gradient(truncated_items)[0].items():
        torch.testing.assert_close(expected[name], value, atol=2e-5, rtol=1e-4)


def test_a_sample_that_is_cut_keeps_the_candidates_of_what_is_left(truncated_items):
    item = truncated_items[0]
    (cut,) = fit_length([item], len(item.input_ids) - 3, "truncate").items
    kept = cut.attachments.candidates
    assert len(kept) == cut.num_action_tokens == item.num_action_tokens - 3
    assert [kept[i].tolist() for i in range(len(kept))] == [
        item.attachments.candidates[i].tolist() for i in range(len(kept))
    ]
    policy = TrainedPolicy(trained_model())
    with torch.no_grad():
        logps, _ = policy.logps(policy.batch([cut]))
    np.testing.assert_allclose(logps.numpy(), cut.actor_logps, atol=1e-5)
