"""The critic: advantages by hand, a PPO run that learns, and a resume that keeps the head."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.training import CheckpointConfig, make_ppo
from ludic.training.critic import TokenGAE
from ludic.types import ConfigError, SampleAttachments, SAWItem
from tests.unit.training.bandit import bandit_trainer, tiny_llama
from tests.unit.training.samples import random_items
from tests.unit.training.test_trainer import hand_trainer, mean_reward


def item(rewards, *, rollout="r", segment=0, truncated=False):
    count = len(rewards)
    meta = {"rollout_id": rollout, "segment": segment, "episode_truncated": truncated}
    attachments = SampleAttachments(token_rewards=np.array(rewards, dtype=np.float32))
    return SAWItem(list(range(count + 1)), None, [0] + [1] * count, 0.0, meta, attachments)


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


def test_an_episode_in_two_samples_is_one_chain_whatever_their_order():
    rule = TokenGAE(gamma=0.9, lam=0.8, normalize=False)
    values = np.array([0.5, 0.2, 0.4, 0.1])
    [whole] = rule.credit([item([0, 1, 0, 2])], [values])
    late, early = rule.credit([item([0, 2], segment=1), item([0, 1], segment=0)], [values[2:], values[:2]])
    assert np.concatenate([early.token_weights, late.token_weights]) == pytest.approx(whole.token_weights)


def test_an_episode_that_was_cut_off_goes_on_from_where_it_stood():
    # λ = 0: A = r + γ V' − V; the last one with V' = 0 when the episode is over, V' = V when it was cut off.
    rule = TokenGAE(gamma=0.5, lam=0.0, normalize=False)
    over, cut = rule.credit([item([0, 1]), item([0, 1], rollout="s", truncated=True)], [np.array([0.2, 0.6])] * 2)
    assert over.token_weights == pytest.approx([0.1, 0.4])
    assert cut.token_weights == pytest.approx([0.1, 0.7])


def test_normalised_advantages_have_mean_zero_and_deviation_one_over_all_tokens():
    items = [item([0, 1, 0]), item([3.0], rollout="s")]
    done = TokenGAE().credit(items, [np.zeros(3), np.zeros(1)])
    everything = np.concatenate([d.token_weights for d in done])
    assert everything.mean() == pytest.approx(0, abs=1e-6) and everything.std() == pytest.approx(1, abs=1e-5)


def test_samples_that_do_not_say_what_they_earned_are_refused():
    with pytest.raises(ConfigError, match="token_rewards"):
        TokenGAE().credit(random_items([5]), [np.zeros(2)])


@pytest.mark.slow
async def test_ppo_learns_the_bandit_and_its_critic_what_to_expect():
    trainer, engine = bandit_trainer(make_ppo(), group_size=1, num_prompts=64)
    history = [await trainer.train_step() for _ in range(30)]
    engine.close()
    assert mean_reward(history[-5:]) > mean_reward(history[:3]) + 0.25
    assert history[0]["train/value/value_mean"] == 0
    assert history[-1]["train/value/value_mean"] > 0.5


def ppo_batch(seed):
    items = random_items([12, 20, 9], seed=seed)
    rng = np.random.default_rng(seed)
    return [
        replace(
            i, attachments=replace(i.attachments, token_rewards=rng.normal(size=i.num_action_tokens).astype(np.float32))
        )
        for i in items
    ]


async def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path):
    batches = [ppo_batch(seed) for seed in range(4)]
    config = CheckpointConfig(output_dir=str(tmp_path), every_n_steps=2)
    straight = hand_trainer(*batches, algo=make_ppo())
    await straight.train()
    await hand_trainer(*batches[:2], algo=make_ppo(), checkpoint_config=config).train()
    resumed = hand_trainer(
        *batches[2:], algo=make_ppo(), model=tiny_llama(seed=5), checkpoint_config=config, resume_from="latest"
    )
    await resumed.train()
    for a, b in zip(straight.value_head.parameters(), resumed.value_head.parameters(), strict=True):
        assert torch.equal(a, b) and bool(a.any())
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


async def test_the_budget_does_not_change_what_ppo_learns():
    weights = []
    for budget in (64, 512):
        trainer = hand_trainer(ppo_batch(0), ppo_batch(1), algo=make_ppo(), cfg={"micro_token_budget": budget})
        await trainer.train()
        weights.append([p.detach().clone() for p in (*trainer.model.parameters(), *trainer.value_head.parameters())])
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*weights, strict=True))
