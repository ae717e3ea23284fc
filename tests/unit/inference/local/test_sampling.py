"""Tokens are drawn from the distribution that was asked for, and the same request draws the same tokens anywhere."""

import asyncio
import math
import platform
from typing import Any

import numpy as np
import pytest
import torch

from ludic.inference.local.sampling import CHUNK, derive_bits, exponentials, sample
from ludic.inference.local.sequence import Sequence
from ludic.types import derive_seed
from tests.extended import cases
from tests.unit.inference.local.tiny_models import (
    ask_all,
    make_engine,
    new_model,
    reference_model,
    request,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -1.0, 0.25, -2.0, 0.75])
NUM_DRAWS = 1200


def make_sequence(
    seed: int = 0,
    *,
    prompt: tuple[int, ...] = (0,),
    written: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> Sequence:
    sequence = Sequence(
        number=seed,
        request=request(prompt, **{"temperature": 1.0, **sampling}),
        deliver=lambda sequence, error: None,
        seed=seed,
        stop_ids=frozenset(stop_ids),
    )
    for token in written:
        sequence.append(token, -1.0, 0)
    return sequence


def processed(logits_V: torch.Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray[Any, Any]:
    """The distribution, worked out the slow way: one token after the other."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits_V.tolist())}
    ranked = sorted(weights, key=lambda token: -weights[token])
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        total, kept, mass = sum(weights[token] for token in ranked), [], 0.0
        for token in ranked:
            kept.append(token)
            mass += weights[token] / total
            if mass >= top_p:
                break
        ranked = kept
    ranked = [token for token in ranked if weights[token] >= min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in ranked)
    return np.array([weights[t] / total if t in ranked else 0.0 for t in range(len(logits_V))])


def assert_drawn_from(drawn: list[int], probs_V: np.ndarray[Any, Any]) -> None:
    """Chi-square, at a p-value of about 3e-5 (z = 4, by the Wilson-Hilferty approximation)."""
    counts_V = np.bincount(drawn, minlength=len(probs_V))
    possible = probs_V > 0
    assert counts_V[~possible].sum() == 0, "a token that was ruled out"
    expected = probs_V[possible] * len(drawn)
    statistic = ((counts_V[possible] - expected) ** 2 / expected).sum()
    freedom = max(possible.sum() - 1, 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} is above {limit:.1f}: {counts_V} for {expected}"


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 50},
        {"top_p": 0.6},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.15},
    ],
    ids=str,
)
def test_frequencies_and_logprobs_are_those_of_the_processed_softmax(setting):
    sequences = [make_sequence(seed, **setting) for seed in range(NUM_DRAWS)]
    drawn, logprobs = sample(LOGITS.repeat(NUM_DRAWS, 1), sequences)
    probs_V = processed(LOGITS, **setting)
    assert_drawn_from(drawn, probs_V)
    np.testing.assert_allclose(logprobs, np.log(probs_V[drawn]), atol=1e-5)


@pytest.mark.parametrize("vocab", cases([CHUNK + 1, 300, 4 * CHUNK], default=[300]))
@pytest.mark.parametrize("setting", [{}, {"top_k": 40}, {"temperature": 0.7, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_chunks_and_then_tokens_are_drawn_from_the_processed_softmax(vocab, setting):
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    logits_V[vocab - 1] = 3.0  # the last chunk counts, however few its tokens are
    sequences = [make_sequence(seed, **setting) for seed in range(2 * NUM_DRAWS)]
    drawn, logprobs = sample(logits_V.repeat(len(sequences), 1), sequences)
    probs_V = processed(logits_V, **setting)
    assert probs_V[drawn].min() > 0, "a token that was ruled out"
    np.testing.assert_allclose(logprobs, np.log(probs_V[drawn]), atol=1e-5)
    for by in (np.arange(vocab) // CHUNK, np.arange(vocab) % 11):  # between chunks, and within them
        classes = np.where(probs_V > 0, by, by.max() + 1)
        expected = np.bincount(classes, weights=probs_V)
        is_large = expected * len(drawn) > 5
        assert_drawn_from(
            [int(c) for c in classes[drawn] if is_large[c]], np.where(is_large, expected, 0) / expected[is_large].sum()
        )


def test_one_seed_draws_from_the_softmax_at_every_position():
    sequences = [make_sequence(7, prompt=(0,) * (1 + n)) for n in range(1000)]
    drawn, _ = sample(LOGITS.repeat(1000, 1), sequences)
    assert_drawn_from(drawn, processed(LOGITS))


async def test_frequencies_of_the_engine_are_those_of_the_model():
    prompt = some_prompt(9)
    async with make_engine() as engine:
        answers = await ask_all(
            engine, [request(prompt, temperature=1.5, max_tokens=1, seed=n) for n in range(NUM_DRAWS // 2)]
        )
    logits_V = reference_model()(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    probs_V = (logits_V / 1.5).softmax(-1).numpy()
    drawn = np.concatenate([answer.completion_token_ids for answer in answers])
    common = np.argsort(-probs_V)[:5]  # the rest together, so that every class is large enough
    classes = np.full(len(probs_V), 5)
    classes[common] = np.arange(5)
    assert_drawn_from(classes[drawn].tolist(), np.bincount(classes, weights=probs_V))


# --- penalties, by hand ---


@pytest.mark.parametrize(
    "setting, expected",
    [
        # Positive logits are divided, negative ones multiplied, for tokens of the prompt and of the reply.
        ({"repetition_penalty": 2.0}, [1.0, 1.0, 0.25, 0.0, -1.0, 1.5, -1.0, 0.25, -2.0, 0.75]),
        # Only the reply counts: token 4 twice, token 2 once.
        ({"frequency_penalty": 0.5}, [2.0, 1.0, 0.0, 0.0, -1.5, 1.5, -1.0, 0.25, -2.0, 0.75]),
        ({"presence_penalty": 0.5}, [2.0, 1.0, 0.0, 0.0, -1.0, 1.5, -1.0, 0.25, -2.0, 0.75]),
        ({"frequency_penalty": 0.5, "presence_penalty": -1.0}, [2.0, 1.0, 1.0, 0.0, -0.5, 1.5, -1.0, 0.25, -2.0, 0.75]),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5},
            [1.0, 1.0, -0.25, 0.0, -2.0, 1.5, -1.0, 0.25, -2.0, 0.75],
        ),
    ],
)
def test_penalties_are_as_worked_out_by_hand(setting, expected):
    written = {"prompt": (0, 0, 3), "written": (4, 2, 4)}
    sequences = [make_sequence(seed, **written, **setting) for seed in range(NUM_DRAWS // 2)]
    drawn, logprobs = sample(LOGITS.repeat(len(sequences), 1), sequences)
    probs_V = processed(torch.tensor(expected))
    assert_drawn_from(drawn, probs_V)
    np.testing.assert_allclose(logprobs, np.log(probs_V[drawn]), atol=1e-5)


def test_a_penalty_counts_before_a_greedy_choice():
    (token,), _ = sample(LOGITS.repeat(1, 1), [make_sequence(prompt=(0,), temperature=0.0, repetition_penalty=3.0)])
    assert token == 5


def test_greedy_rows_among_sampled_rows_take_the_likeliest():
    settings = [{"temperature": 0.0}, {}, {"temperature": 0.0, "top_k": 3}, {"temperature": 0.3, "top_p": 0.5}]
    sequences = [make_sequence(n, **settings[n % 4]) for n in range(400)]
    drawn, logprobs = sample(LOGITS.repeat(400, 1), sequences)
    assert set(drawn[0::4]) == set(drawn[2::4]) == {0}
    np.testing.assert_allclose(logprobs[0::2], math.log(processed(LOGITS)[0]), atol=1e-5)
    assert_drawn_from(drawn[1::4], processed(LOGITS))
    assert_drawn_from(drawn[3::4], processed(LOGITS, temperature=0.3, top_p=0.5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_comes_before_min_tokens(temperature):
    stops = {"stop_ids": (0, 5), "min_tokens": 2, "temperature": temperature}
    early = [make_sequence(n, written=(1,), **stops) for n in range(300)]
    late = [make_sequence(n, written=(1, 1), **stops) for n in range(300)]
    assert not {0, 5} & set(sample(LOGITS.repeat(300, 1), early)[0])
    assert {0} <= set(sample(LOGITS.repeat(300, 1), late)[0])


def test_a_half_precision_model_is_sampled_in_full_precision():
    logits_NV = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    sequences = [make_sequence(n, top_p=0.9) for n in range(5)]
    assert sample(logits_NV.clone(), sequences) == sample(logits_NV.float(), sequences)


# --- logits that are not finite ---

INFINITY = float("inf")
BROKEN = {
    "all NaN": (slice(None), math.nan),
    "one NaN": (slice(3, 4), math.nan),
    "all -inf": (slice(None), -INFINITY),
    "one +inf": (slice(3, 4), INFINITY),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("vocab", [10, 300])
def test_logits_that_are_not_finite_give_nan_and_leave_other_rows_alone(broken, setting, vocab):
    where, value = BROKEN[broken]
    logits_NV = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1))
    sequences = [make_sequence(n, **setting) for n in range(3)]
    expected, expected_logprobs = sample(logits_NV.clone(), sequences)
    logits_NV[1, where] = value
    drawn, logprobs = sample(logits_NV.clone(), sequences)
    assert math.isnan(logprobs[1]) and 0 <= drawn[1] < vocab
    assert (drawn[::2], logprobs[::2]) == (expected[::2], expected_logprobs[::2])


# --- noise ---


def bits_of(seed: int, positions: Any, tokens: Any) -> torch.Tensor:
    keys = derive_bits(torch.tensor([[seed]]), torch.as_tensor(positions)[:, None])
    return derive_bits(keys, torch.as_tensor(tokens))


def test_noise_is_the_seed_derived_for_a_position_and_a_token():
    tokens_of = [0, 1, 151_935, -1, -1187]
    for seed in (0, 5, 2**63 - 1):
        found = bits_of(seed, [1, 2, 70_000], tokens_of) >> 16 & (2**48 - 1)
        assert found.tolist() == [[derive_seed(seed, p, t) for t in tokens_of] for p in (1, 2, 70_000)]


def lanes(name: str) -> torch.Tensor:
    """A million uniform numbers [rows, neighbours], neighbours in tokens, in positions or in seeds."""
    if name == "tokens":
        bits = bits_of(3, range(20), range(50_000))
    elif name == "chunks":
        bits = bits_of(3, range(1000), range(-1000, 0))
    elif name == "positions":
        bits = bits_of(3, range(50_000), range(20)).t()
    else:
        keys = derive_bits(torch.arange(50_000)[:, None], torch.tensor([[17]]))
        bits = derive_bits(keys, torch.arange(20)).t()
    return (bits >> 16 & (2**48 - 1)).double() / 2**48


@pytest.mark.parametrize("name", cases(["tokens", "chunks", "positions", "seeds"], default=["tokens", "seeds"]))
def test_noise_is_uniform_and_neighbours_are_independent(name):
    uniform = lanes(name)
    num = uniform.numel()
    for scale in (1, 2**16, 2**32):  # the high, the middle and the low bits
        cells = (uniform * scale % 1 * 64).long()
        assert_drawn_from(cells.flatten().tolist(), np.full(64, 1 / 64))
        assert_drawn_from((cells[:, 1:] * 64 + cells[:, :-1]).flatten().tolist(), np.full(4096, 1 / 4096))
        centred = uniform * scale % 1 - 0.5
        for shift in (1, 2, 7):
            correlation = 12 * (centred[:, shift:] * centred[:, :-shift]).mean()
            assert abs(float(correlation)) < 4.5 / math.sqrt(num)  # 1 / √n is its standard deviation


def test_noise_reaches_both_tails_and_never_zero_or_infinity():
    ends = torch.tensor([0, 2**16 - 1, -1, -(2**16)])  # the smallest uniform number twice, then the largest
    found = exponentials(ends).tolist()
    assert found[0] == found[1] == pytest.approx(49 * math.log(2), rel=1e-14)
    assert found[2] == found[3] == pytest.approx(2.0**-49, rel=1e-14)
    # Rare tokens keep their probability: the share below 2^-k is 2^-k.
    drawn = exponentials(bits_of(1, range(100), range(20_000)))
    for k in (4, 10, 14):
        expected = drawn.numel() * -math.expm1(-(2.0**-k))
        assert abs(int((drawn < 2.0**-k).sum()) - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("epsilon", [0.01, 0.001])
def test_moved_logits_change_few_draws(epsilon):
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(1000, 3000, generator=generator) * 2
    moved_NV = logits_NV + (torch.rand(logits_NV.shape, generator=generator) * 2 - 1) * epsilon
    sequences = [make_sequence(n) for n in range(1000)]
    before, after = sample(logits_NV, sequences)[0], sample(moved_NV, sequences)[0]
    # At most ε each (docs/engine.md); inverse transform sampling changes most of them.
    num_changed = sum(a != b for a, b in zip(before, after, strict=True))
    assert num_changed <= 1000 * epsilon + 4 * math.sqrt(1000 * epsilon)


# --- seeds ---

SEEDED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 2.0, "min_p": 0.02, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]


def seeded_requests():
    return [request(some_prompt(2 + 9 * n), seed=100 + n, max_tokens=10, **setting) for n, setting in enumerate(SEEDED)]


@pytest.fixture(scope="module")
def answers_alone():
    async def ask_one_by_one():
        async with make_engine() as engine:
            return [(await ask_all(engine, [r]))[0] for r in seeded_requests()]

    return asyncio.run(ask_one_by_one())


@pytest.mark.parametrize(
    "setting",
    [{}, {"max_prefill_tokens": 5, "block_size": 16}, {"kv_tokens": 100, "max_sequences": 6}],
    ids=str,
)
async def test_a_seeded_request_gets_the_same_tokens_alone_and_in_any_batch(setting, answers_alone):
    company = [request(some_prompt(1 + n, seed=1), temperature=1.0, max_tokens=3 + n) for n in range(12)]
    async with make_engine(**setting) as engine:
        first = await ask_all(engine, [*company[:6], *seeded_requests(), *company[6:]])
        again = await ask_all(engine, [*seeded_requests(), *company])  # this time with prefix hits
        assert engine.stats["prefix_tokens_reused"] > 0
    alone = answers_alone
    assert [tokens(answer) for answer in first[6:10]] == [tokens(answer) for answer in alone]
    assert [tokens(answer) for answer in again[:4]] == [tokens(answer) for answer in alone]
    for other, answer in zip([*first[6:10], *again[:4]], [*alone, *alone], strict=True):
        np.testing.assert_allclose(other.completion_logprobs, answer.completion_logprobs, atol=1e-4)


@pytest.mark.skipif(platform.machine() != "aarch64", reason="other math libraries may round by the size of the batch")
@pytest.mark.parametrize("family", cases(["llama", "qwen3", "gemma2-softcap"], default=["gemma2-softcap"]))
async def test_logits_do_not_depend_on_the_batch_in_any_bit(family):
    model = new_model(family, hidden_size=256, intermediate_size=512, head_dim=64)
    requests = [request(some_prompt(1 + 13 * n), temperature=1.5, seed=n, max_tokens=6) for n in range(8)]
    async with make_engine(model) as engine:
        alone = [(await ask_all(engine, [r]))[0] for r in requests]
        with_prefixes = await ask_all(engine, requests)
        engine.release_cache()
        together = await ask_all(engine, requests)
    async with make_engine(model, max_prefill_tokens=33, kv_tokens=300) as engine:
        in_pieces = await ask_all(engine, requests)
    for answers in (with_prefixes, together, in_pieces):
        for one, other in zip(alone, answers, strict=True):
            assert tokens(one) == tokens(other)
            assert one.completion_logprobs.tolist() == other.completion_logprobs.tolist()


async def test_any_integer_is_a_seed():
    seeds = [0, -1, 2**63, 2**64 + 5, 10**30]
    async with make_engine() as engine:
        answers = await ask_all(engine, [request(some_prompt(5), temperature=1.5, seed=seed) for seed in seeds])
    assert len({tuple(tokens(answer)) for answer in answers}) >= len(seeds) - 1


async def test_different_seeds_differ_and_unseeded_requests_draw_from_the_engines_seed():
    requests = [request(some_prompt(5), temperature=1.5, max_tokens=8) for _ in range(4)]
    drawn = []
    for seed in (1, 1, 2):
        async with make_engine(seed=seed) as engine:
            drawn.append([tokens(answer) for answer in await ask_all(engine, requests)])
            seeded = await ask_all(
                engine, [request(some_prompt(5), temperature=1.5, seed=n, max_tokens=8) for n in range(10)]
            )
    assert len({tuple(tokens(answer)) for answer in seeded}) == 10
    assert drawn[0] == drawn[1] != drawn[2] and len({tuple(text) for text in drawn[0]}) == 4


@pytest.mark.parametrize("vocab", [10, 300, 5000])
def test_a_greedy_row_has_the_same_logprob_beside_greedy_and_sampled_rows(vocab):
    logits = torch.randn(200, vocab, generator=torch.Generator().manual_seed(0)) * 3
    greedy = [make_sequence(seed, temperature=0.0) for seed in range(199)]
    alone = sample(logits[:199].clone(), greedy)
    beside = sample(logits.clone(), [*greedy, make_sequence(199)])
    assert alone == (beside[0][:199], beside[1][:199])
