"""`Reduction("episode_mean")`: value and gradient against a plain loop over episodes, in fp64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.distributed.ranks import Ranks
from ludic.training.learner.batches import PreparedBatch, scatter_batch
from ludic.training.learner.gradients import batch_facts
from ludic.training.learner.packing import collate_saw_items, episode_of, pack
from ludic.training.losses import (
    ActionTokens,
    CISPOLoss,
    ClippedSurrogateLoss,
    GMPOLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    Reduction,
    ReinforceLoss,
    RoutedLoss,
    TokenClippedSurrogateLoss,
)
from ludic.types import SAWItem
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

EPISODE_MEAN = Reduction("episode_mean")
TOKEN_LOSSES = [TokenClippedSurrogateLoss, CISPOLoss, MaskedCausalLMCrossEntropyLoss]
SAMPLE_LOSSES = [ClippedSurrogateLoss, GMPOLoss]


def samples(lengths, episodes, **facts) -> list[SAWItem]:
    """Random samples of these lengths and episodes."""
    items = random_items(lengths, seed=len(lengths), **facts)
    return [item.with_origin(episode=name) for item, name in zip(items, episodes, strict=True)]


def leaves(items):
    """The policy's log-probs of each sample, near the sampler's."""
    draw = torch.Generator().manual_seed(len(items))
    old = {id(item): torch.tensor(item.actor_logps, dtype=torch.float64) for item in items}
    return {key: (own + 0.3 * torch.randn(len(own), generator=draw)).requires_grad_() for key, own in old.items()}


def tokens_of(items, logps, facts=None) -> ActionTokens:
    """What a loss sees of one micro-batch."""
    actions = pack(items, "cpu").actions
    return ActionTokens(
        logps=torch.cat([logps[id(item)] for item in items]),
        weights=actions.weight_A.double(),
        item_index=actions.item_A,
        num_items=len(items),
        facts=batch_facts(items) if facts is None else facts,
        old_logps=actions.old_logp_A.double(),
        objectives=actions.objectives,
        episodes=actions.episodes,
    )


def value_and_gradients(loss, items, logps):
    value = loss(tokens_of(items, logps))[0]
    return value.item(), torch.autograd.grad(value, [logps[id(item)] for item in items])


def by_hand(loss, items, logps):
    """mean over episodes of (Σ over the episode's tokens of a term) / (its tokens); one sample's term is its mean term."""
    own_mean = type(loss)(**{**_settings(loss), "reduction": "sample_mean"})
    episodes: dict[str, list[SAWItem]] = {}
    for number, item in enumerate(items):
        episodes.setdefault(episode_of(item) or f"alone {number}", []).append(item)
    total = torch.zeros((), dtype=torch.float64)
    for members in episodes.values():
        mean = torch.zeros((), dtype=torch.float64)
        num_tokens = sum(member.num_action_tokens for member in members)
        for member in members:
            mean = mean + own_mean(tokens_of([member], logps))[0] * member.num_action_tokens / num_tokens
        total = total + mean / len(episodes)
    return total.item(), torch.autograd.grad(total, [logps[id(item)] for item in items])


def _settings(loss):
    return {"length_normalize": True} if type(loss) in SAMPLE_LOSSES else {}


def assert_equal(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-15)
    for own, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-14)


CASES = [(kind, {}) for kind in TOKEN_LOSSES] + [(kind, {"length_normalize": True}) for kind in SAMPLE_LOSSES]


# --- by hand ------------------------------------------------------------------------------------------------


def test_a_session_counts_the_same_however_many_threads_it_has():
    # a: one sample of 2 tokens; b: samples of 1 and 3 tokens. Term −A ℓ with A = 1 and ℓ = −1 … −6, gradient −A / divisor.
    items = [
        SAWItem([9] + [1] * n, None, [0] + [1] * n, 1.0).with_origin(episode=e)
        for n, e in ((2, "a"), (1, "b"), (3, "b"))
    ]
    facts = batch_facts(items)
    assert (facts.num_episodes, facts.episode_tokens, facts.num_items) == (2, {"a": 2, "b": 4}, 3)
    logps = torch.arange(-1.0, -7.0, -1.0, dtype=torch.float64).requires_grad_()
    actions = pack(items, "cpu").actions
    tokens = ActionTokens(
        logps=logps,
        weights=actions.weight_A,
        item_index=actions.item_A,
        num_items=3,
        facts=facts,
        episodes=actions.episodes,
    )
    loss = MaskedCausalLMCrossEntropyLoss(reduction="episode_mean")(tokens)[0]
    loss.backward()
    # ((1 + 2) / 2 + (3 + 4 + 5 + 6) / 4) / 2 = (1.5 + 4.5) / 2
    assert loss.item() == 3.0
    assert logps.grad.tolist() == [-1 / 4, -1 / 4, -1 / 8, -1 / 8, -1 / 8, -1 / 8]


@pytest.mark.parametrize(("kind", "how"), CASES)
@pytest.mark.parametrize("episodes", [["a", "b", "a", "c", "b"], ["a"] * 5, [None, "b", None, "b", "b"]], ids=str)
def test_value_and_gradient_are_those_of_a_plain_loop(kind, how, episodes):
    items = [replace(i, origin=replace(i.origin, rollout_id=None)) for i in samples([9, 17, 5, 12, 7], episodes)]
    loss, logps = kind(**how, reduction="episode_mean"), leaves(items)
    assert_equal(value_and_gradients(loss, items, logps), by_hand(loss, items, logps))


@pytest.mark.parametrize(("kind", "how"), [*CASES, (ReinforceLoss, {})])
def test_with_one_sample_per_episode_it_is_the_mean_over_samples(kind, how):
    items = samples([9, 17, 5, 12], ["a", "b", "c", None])
    logps = leaves(items)
    found = value_and_gradients(kind(**how, reduction="episode_mean"), items, logps)
    assert_equal(found, value_and_gradients(kind(**how, reduction="sample_mean"), items, logps))


def test_samples_that_name_no_episode_are_one_with_those_of_their_rollout():
    items = [item.with_origin(rollout_id="r", segment=n) for n, item in enumerate(random_items([5, 9]))]
    assert batch_facts(items).num_episodes == 1


# --- however it is split ------------------------------------------------------------------------------------

EPISODES = st.lists(st.tuples(st.integers(2, 12), st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=8)


@given(EPISODES, st.lists(st.integers(0, 3), min_size=8, max_size=8))
@pytest.mark.parametrize("loss", [TokenClippedSurrogateLoss(reduction=EPISODE_MEAN), GMPOLoss(reduction=EPISODE_MEAN)])
def test_micro_batches_and_ranks_add_up_to_the_batch(loss, drawn, places):
    items = samples(*zip(*drawn, strict=True))
    logps, facts = leaves(items), batch_facts(items)
    whole = value_and_gradients(loss, items, logps)
    parts = [[item for item, own in zip(items, places, strict=False) if own == place] for place in range(4)]
    value = sum(loss(tokens_of(part, logps, facts))[0] for part in parts if part)
    assert_equal((value.item(), torch.autograd.grad(value, [logps[id(item)] for item in items])), whole)


class OneOfTwo(Ranks):
    """The first of two ranks, with what the other one reports."""

    rank, world_size = 0, 2

    def __init__(self, other):
        super().__init__()
        self.other, self.given = other, None

    def gather(self, value):
        return [value, self.other]

    def scatter(self, values):
        self.given = values
        return values[0]


def test_an_episode_whose_samples_lie_on_two_ranks_is_counted_once():
    items = samples([9, 17, 5, 12], ["a", "b", "a", "b"])
    loss, logps = TokenClippedSurrogateLoss(reduction="episode_mean"), leaves(items)
    ranks = OneOfTwo(PreparedBatch(items[2:]))
    scatter_batch(ranks, PreparedBatch(items[:2]), lambda whole: {})
    assert all(share.facts.num_episodes == 2 for share in ranks.given)
    assert sorted(len(share.items) for share in ranks.given) != [0, 4]
    value = sum(loss(tokens_of(share.items, logps, share.facts))[0] for share in ranks.given)
    found = value.item(), torch.autograd.grad(value, [logps[id(item)] for item in items])
    assert_equal(found, value_and_gradients(loss, items, logps))


def test_a_term_of_a_mixture_counts_the_episodes_of_its_samples():
    rl, sft = samples([9, 5, 7], ["a", "a", "b"], objective="rl"), samples([12, 4], ["a", "d"], objective="sft")
    items = [rl[0], sft[0], rl[1], sft[1], rl[2]]
    logps = leaves(items)
    terms = {"rl": TokenClippedSurrogateLoss(reduction="episode_mean"), "sft": CISPOLoss(reduction="episode_mean")}
    loss = RoutedLoss([LossTerm(name=name, loss=own) for name, own in terms.items()])
    value, gradients = value_and_gradients(loss, items, logps)
    parts = [value_and_gradients(own, group, logps) for own, group in zip(terms.values(), (rl, sft), strict=True)]
    assert value == pytest.approx(sum(part for part, _ in parts), rel=1e-12)
    expected = dict(zip(map(id, [*rl, *sft]), [g for _, grads in parts for g in grads], strict=True))
    for item, own in zip(items, gradients, strict=True):
        torch.testing.assert_close(own, expected[id(item)], rtol=1e-10, atol=1e-14)


def test_the_padded_form_knows_the_episodes():
    items = samples([9, 17, 5, 12], ["a", "b", "a", None])
    items[3] = items[3].with_origin(rollout_id=None)
    batch = collate_saw_items(items, pad_token_id=0)
    logits = torch.randn(4, 17, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = TokenClippedSurrogateLoss(reduction="episode_mean")
    value, _ = loss.compute(logits, batch)
    logps = torch.log_softmax(logits, -1)
    chosen = {}
    for row, item in enumerate(items):
        where = torch.tensor(item.action_mask).nonzero()[:, 0]
        chosen[id(item)] = logps[row, where - 1, torch.tensor(item.input_ids, dtype=torch.long)[where]]
    flat = loss(tokens_of(items, chosen))[0]
    torch.testing.assert_close(value.double(), flat.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(value, logits)[0], torch.autograd.grad(flat, logits)[0])
