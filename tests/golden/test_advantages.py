"""Advantages from a critic, over tokens and over turns: worked by hand, enumerated, and against the credit rule for turns."""

from dataclasses import replace

import numpy as np
import pytest

from ludic.agents import FoldingReActAgent
from ludic.batch_gen import stitch_rollout
from ludic.context import SummarisedDialog
from ludic.interaction import SingleAgentProtocol
from ludic.training.credit_assignment import GAE, EpisodicReturn
from ludic.training.critic.gae import TokenGAE, TurnGAE
from ludic.training.learner.packing import truncated
from ludic.types import ConfigError, InferenceSpec, ReturnSpec, SampleAttachments, SampleOrigin, SAWItem, StopReason
from tests.fakes import CountingEnv, make_agent
from tests.unit.training.samples import random_items


def item(rewards, *, turns=None, rollout="r", segment=0, truncated=False):
    count = len(rewards)
    stop = StopReason.MAX_STEPS if truncated else StopReason.TERMINATED
    origin = SampleOrigin(rollout_id=rollout, segment=segment, stop=stop)
    attachments = SampleAttachments(
        token_rewards=np.array(rewards, dtype=np.float32), token_turns=None if turns is None else np.array(turns, float)
    )
    return SAWItem(list(range(count + 1)), None, [0] + [1] * count, 0.0, {}, attachments, origin)


# --- tokens ---


def test_advantages_worked_by_hand():
    # γ = 1, λ = 0.5; r = (0, 0, 1), V = (0.5, 0.2, 0.4).
    # δ = (0 + 0.2 − 0.5, 0 + 0.4 − 0.2, 1 − 0.4) = (−0.3, 0.2, 0.6)
    # A₂ = 0.6, A₁ = 0.2 + 0.5·0.6 = 0.5, A₀ = −0.3 + 0.5·0.5 = −0.05; returns = A + V = (0.45, 0.7, 1.0)
    rule = TokenGAE(gamma=1.0, lam=0.5, normalize=False)
    [done] = rule.credit([item([0, 0, 1])], [np.array([0.5, 0.2, 0.4])])
    assert done.token_weights == pytest.approx([-0.05, 0.5, 0.6])
    assert done.attachments.token_returns == pytest.approx([0.45, 0.7, 1.0])
    assert done.attachments.token_values == pytest.approx([0.5, 0.2, 0.4])
    assert done.weight == pytest.approx((-0.05 + 0.5 + 0.6) / 3)


def test_rounding_errors_of_a_perfect_critic_are_not_scaled_up():
    # The critic is off by one float32 step in two of four episodes: 6e-8 over 3e-8 + 1e-8 would be weights of ±0.75.
    right = np.float32(0.7)
    said = [right, np.nextafter(right, np.float32(1)), right, np.nextafter(right, np.float32(1))]
    items = [item([right], rollout=str(n)) for n in range(4)]
    done = TokenGAE().credit(items, [np.array([value]) for value in said])
    assert all(not one.token_weights.any() and one.weight == 0.0 for one in done)


@pytest.mark.parametrize("rule", [TokenGAE, TurnGAE])
def test_an_episode_in_two_samples_is_one_chain_whatever_their_order(rule):
    """The second turn lies in both: a summary at the end of one segment, the action at the beginning of the next."""
    gae = rule(gamma=0.9, lam=0.8, normalize=False)
    values = np.array([0.5, 0.2, 0.4, 0.1])
    [whole] = gae.credit([item([0, 1, 0, 2], turns=[0, 1, 1, 2])], [values])
    parts = [item([0, 2], turns=[1, 2], segment=1), item([0, 1], turns=[0, 1], segment=0)]
    late, early = gae.credit(parts, [values[2:], values[:2]])
    assert np.concatenate([early.token_weights, late.token_weights]) == pytest.approx(whole.token_weights)
    joined = [early.attachments.token_returns, late.attachments.token_returns]
    assert np.concatenate(joined) == pytest.approx(whole.attachments.token_returns)


def test_a_truncated_episode_bootstraps_from_its_last_value():
    # λ = 0: A = r + γ V' − V; the last one with V' = 0 when the episode is over, V' = V when it was cut off.
    rule = TokenGAE(gamma=0.5, lam=0.0, normalize=False)
    over, cut = rule.credit([item([0, 1]), item([0, 1], rollout="s", truncated=True)], [np.array([0.2, 0.6])] * 2)
    assert over.token_weights == pytest.approx([0.1, 0.4])
    assert cut.token_weights == pytest.approx([0.1, 0.7])


@pytest.mark.parametrize("rule", [TokenGAE, TurnGAE])
def test_normalised_advantages_have_mean_zero_and_deviation_one_over_all_tokens(rule):
    items = [item([0, 1, 0], turns=[0, 0, 1]), item([3.0], turns=[0], rollout="s")]
    done = rule().credit(items, [np.zeros(3), np.zeros(1)])
    everything = np.concatenate([d.token_weights for d in done])
    assert everything.mean() == pytest.approx(0, abs=1e-6) and everything.std() == pytest.approx(1, abs=1e-5)


# --- turns ---


def test_turn_advantages_worked_by_hand():
    # Two turns of three and two tokens; γ = 0.9, λ = 0.5. Values before their first tokens: 0.5 and 0.3; rewards 0.2 and 1.
    # δ₁ = 1 − 0.3 = 0.7; δ₀ = 0.2 + 0.9·0.3 − 0.5 = −0.03. A₁ = 0.7, A₀ = −0.03 + 0.45·0.7 = 0.285.
    # What the critic says inside the turns (9, 8, 7) is not used.
    rule = TurnGAE(gamma=0.9, lam=0.5, normalize=False)
    values = np.array([0.5, 9.0, 8.0, 0.3, 7.0])
    [done] = rule.credit([item([0, 0, 0.2, 0, 1], turns=[0, 0, 0, 1, 1])], [values])
    assert done.token_weights == pytest.approx([0.285] * 3 + [0.7] * 2)
    assert done.attachments.token_returns == pytest.approx([0.785] * 3 + [1.0] * 2)
    assert done.attachments.token_values == pytest.approx(values)


def test_a_cut_off_episode_is_continued_by_a_turn_with_the_critics_last_value():
    # As above, but with V = 0.6 at the last token: δ₁ = 1 + 0.9·0.6 − 0.3 = 1.24, A₀ = −0.03 + 0.45·1.24 = 0.528.
    rule = TurnGAE(gamma=0.9, lam=0.5, normalize=False)
    values = np.array([0.5, 9.0, 8.0, 0.3, 0.6])
    [done] = rule.credit([item([0, 0, 0.2, 0, 1], turns=[0, 0, 0, 1, 1], truncated=True)], [values])
    assert done.token_weights == pytest.approx([0.528] * 3 + [1.24] * 2)


def enumerated(rewards, values, after, gamma, lam) -> list[float]:
    """GAE by its definition: (1 − λ) Σ λⁿ⁻¹ (n-step advantage), all that reach beyond the end being the longest one."""
    T, advantages = len(rewards), []
    ahead = [*values, after]
    for t in range(T):
        steps = [
            sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * ahead[t + n] - values[t]
            for n in range(1, T - t + 1)
        ]
        weighted = [(1 - lam) * lam**i * steps[i] for i in range(len(steps) - 1)]
        advantages.append(sum(weighted) + lam ** (len(steps) - 1) * steps[-1])
    return advantages


@pytest.mark.parametrize("seed", range(6))
def test_turn_advantages_are_the_enumerated_mixture_of_n_step_ones(seed):
    """Random turns, cut into random segments (in the middle of turns, too), some episodes truncated."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, size=6)
    turns = np.repeat(np.arange(6), lengths)
    ends = np.cumsum(lengths) - 1
    rewards = np.zeros(len(turns), dtype=np.float32)
    rewards[ends] = rng.normal(size=6)
    values = rng.normal(size=len(turns)).astype(np.float32)
    truncated = bool(seed % 2)
    expected = enumerated(
        rewards[ends].tolist(), values[ends - lengths + 1].tolist(), float(values[-1]) * truncated, 0.9, 0.7
    )
    cuts = np.sort(rng.choice(np.arange(1, len(turns)), size=3, replace=False))
    parts = zip(*(np.split(array, cuts) for array in (rewards, turns, values)), strict=True)
    items, said = [], []
    for number, (own_rewards, own_turns, own_values) in enumerate(parts):
        items.append(item(own_rewards, turns=own_turns, segment=number, truncated=truncated))
        said.append(own_values)
    done = TurnGAE(gamma=0.9, lam=0.7, normalize=False).credit(items, said)
    assert np.concatenate([d.token_weights for d in done]) == pytest.approx(np.repeat(expected, lengths), abs=1e-5)


def test_turns_of_one_token_equal_tokens():
    rng = np.random.default_rng(0)
    given, values = item(rng.normal(size=7), turns=range(7)), rng.normal(size=7)
    [by_turn] = TurnGAE(gamma=0.9, lam=0.7).credit([given], [values])
    [by_token] = TokenGAE(gamma=0.9, lam=0.7).credit([given], [values])
    assert by_turn.token_weights == pytest.approx(by_token.token_weights)


@pytest.mark.parametrize("max_steps", [3, 8], ids=["cut off", "to its end"])
async def test_the_critic_and_the_credit_rule_for_turns_agree_on_a_real_episode(max_steps):
    """Tool calls, a reply that cannot be read, folds in turns and between them; values made up per token."""
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'

    def look() -> str:
        """Look."""
        return "nothing"

    replies = [call, "<a>inc</a>", "noted", "no action", "again", call, "<a>inc</a>", "more", "<a>inc</a>"]
    agent = make_agent(replies, cls=FoldingReActAgent, ctx=SummarisedDialog(max_turns=1), tools=[look])
    inference = InferenceSpec(return_=ReturnSpec.for_rl())
    (rollout,) = await SingleAgentProtocol(agent).run(env=CountingEnv(3), max_steps=max_steps, inference=inference)
    items = stitch_rollout(rollout, EpisodicReturn().compute([rollout]))
    assert len(items) > 2
    rng = np.random.default_rng(0)
    said = [rng.normal(size=i.num_action_tokens).astype(np.float32) for i in items]
    turns = np.concatenate([i.attachments.token_turns for i in items])
    flat = np.concatenate(said)
    before = [float(flat[np.argmax(turns == t)]) for t in range(int(turns[-1]) + 1)]
    rule = GAE(0.9, 0.7, lambda r: [*before, float(flat[-1])] if r.stop.is_truncation else before)
    weights, targets = rule.compute([rollout]), rule.value_targets([rollout])
    done = TurnGAE(gamma=0.9, lam=0.7, normalize=False).credit(items, said)
    for by_rule, attribute in ((weights, "token_weights"), (targets, "token_returns")):
        for expected, found in zip(stitch_rollout(rollout, by_rule), done, strict=True):
            assert getattr(found.attachments, attribute) == pytest.approx(expected.token_weights, abs=1e-5)


# --- refused ---


def test_samples_without_the_needed_fields_are_refused():
    with pytest.raises(ConfigError, match="token_rewards"):
        TokenGAE().credit(random_items([5]), [np.zeros(2)])
    with pytest.raises(ConfigError, match="token_turns"):
        TurnGAE().credit([item([0, 1])], [np.zeros(2)])
    with pytest.raises(ConfigError, match=r"TurnGAE\(gamma=1.5"):
        TurnGAE(gamma=1.5)


def test_a_duplicate_sample_is_refused():
    with pytest.raises(ConfigError, match=r"segment of rollout r twice \(segments \[0, 0\]\)"):
        TokenGAE().credit([item([0, 1]), item([0, 1])], [np.zeros(2)] * 2)


def test_a_sample_that_was_cut_keeps_the_turns_of_what_is_left():
    given = item([0, 1, 2], turns=[0, 0, 1])
    assert truncated(given, len(given.input_ids) - 1).attachments.token_turns.tolist() == [0, 0]
    assert replace(given).attachments.token_turns.tolist() == [0, 0, 1]
