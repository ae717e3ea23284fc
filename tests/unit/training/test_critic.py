"""Critics on the policy's trunk and on their own: they learn, resume bit for bit, and stay out of the policy's way if asked."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.training import CheckpointConfig, TrainerConfig, make_grpo, make_ppo
from ludic.training.critic.train import explained_variance, make_critic, value_moments
from ludic.training.learner.metrics import MetricSums
from ludic.types import ConfigError, SampleAttachments, SAWItem
from tests.extended import cases
from tests.unit.training.bandit import bandit_trainer, earns, hand_trainer, mean_reward, tiny_llama, train_until
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

VARIANTS = {
    "shared": {},
    "detached": {"critic": "detached"},
    "separate": {"critic": "separate"},
    "separate, over turns": {"critic": "separate", "over": "turns"},
}
every_variant = pytest.mark.parametrize("variant", cases(VARIANTS, default=["shared", "separate, over turns"]))


def critic_for(variant, seed=7):
    return {"critic": tiny_llama(seed=seed)} if VARIANTS[variant].get("critic") == "separate" else {}


def algo(variant, **settings):
    return make_ppo(**{**VARIANTS[variant], **settings})


def ppo_batch(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return [
        replace(
            i,
            attachments=replace(
                i.attachments,
                token_rewards=(scale * rng.normal(size=i.num_action_tokens)).astype(np.float32),
                token_turns=np.arange(i.num_action_tokens) // 2,
            ),
        )
        for i in random_items([12, 20, 9], seed=seed)
    ]


def weights_of(trainer):
    return [p.detach().clone() for p in (*trainer.model.parameters(), *trainer.critic.parameters())]


# --- they learn ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "expected"),
    cases([("shared", 0.5), ("detached", 0.1), ("separate, over turns", 0.5)], default=[("separate, over turns", 0.5)]),
)
async def test_ppo_learns_the_bandit_and_the_critic_its_returns(variant, expected):
    """Chance earns a half. Within 28 updates of 64 episodes the policy earns 0.85 at least, and the critic notices; a head alone,
    on layers that do not move for it, is slower."""
    trainer, engine = bandit_trainer(algo(variant), group_size=1, num_prompts=64, **critic_for(variant))

    def is_learned(history):
        return earns(0.85)(history) and history[-1]["train/value/value_mean"] > expected

    history = await train_until(trainer, is_learned, at_most=28)
    engine.close()
    assert mean_reward(history[:3]) < 0.65 and is_learned(history)
    assert history[0]["train/value/value_mean"] == 0


async def test_separate_critic_learns_under_a_fixed_policy():
    """The same batch again and again: what is left to explain gets less, and the metric says so."""
    trainer = hand_trainer(
        *[ppo_batch(0)] * 30,
        algo=algo("separate", gamma=0.0, value_clip_eps=None),
        cfg={"lr": 1e-2},
        critic=tiny_llama(seed=7),
    )
    said = [(await trainer.train_step())["train/value/explained_variance"] for _ in range(30)]
    assert said[0] == pytest.approx(0.0, abs=1e-6) and said[-1] > 0.8


# --- they resume ---


@every_variant
async def test_resumed_run_with_a_critic_continues_bit_for_bit(variant, tmp_path):
    batches = [ppo_batch(seed) for seed in range(10)]
    config = CheckpointConfig(output_dir=str(tmp_path), every_n_steps=5)
    cfg = {"critic_lr": 3e-3}
    straight = hand_trainer(*batches, algo=algo(variant), cfg=cfg, **critic_for(variant))
    await straight.train()
    await hand_trainer(
        *batches[:5], algo=algo(variant), cfg=cfg, checkpoint_config=config, **critic_for(variant)
    ).train()
    resumed = hand_trainer(
        *batches[5:],
        algo=algo(variant),
        cfg=cfg,
        model=tiny_llama(seed=5),
        checkpoint_config=config,
        resume_from="latest",
        **critic_for(variant, seed=8),
    )
    assert resumed.step == 5
    await resumed.train()
    pairs = list(zip(weights_of(straight), weights_of(resumed), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs) and all(bool(a.any()) for a, _ in pairs)


async def test_checkpoint_of_another_kind_of_critic_is_refused(tmp_path):
    for saved, resumed, message in [
        ("separate", "shared", "critic of this checkpoint is separate"),
        ("shared", "separate", "on the policy's own trunk"),
    ]:
        config = CheckpointConfig(output_dir=str(tmp_path / saved), every_n_steps=1, save_optimizer=False)
        first = hand_trainer(ppo_batch(0), algo=algo(saved), checkpoint_config=config, **critic_for(saved))
        await first.train()
        other = hand_trainer(ppo_batch(0), algo=algo(resumed), **critic_for(resumed))
        state = first.critic.state_dict()
        with pytest.raises(ConfigError, match=message):
            other.critic.load_state_dict(state)


async def test_checkpoint_without_a_critic_is_refused(tmp_path):
    config = CheckpointConfig(output_dir=str(tmp_path), every_n_steps=1, save_optimizer=True)
    await hand_trainer(random_items([12, 20, 9]), algo=make_grpo(group_size=4), checkpoint_config=config).train()
    with pytest.raises(Exception, match="critic|does not fit"):
        hand_trainer(algo=algo("shared"), checkpoint_config=config, resume_from="latest")


async def test_critic_of_other_sizes_is_refused():
    trainer = hand_trainer(algo=algo("separate"), critic=tiny_llama(seed=7))
    wider = hand_trainer(algo=algo("separate"), critic=tiny_llama(seed=7, intermediate_size=96))
    with pytest.raises(ConfigError, match="made as it was made then"):
        wider.critic.load_state_dict(trainer.critic.state_dict())


def test_critic_with_an_adapter_trains_and_saves_only_the_adapter():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_llama(seed=7), peft.LoraConfig(r=2, target_modules="all-linear"))
    trainer = hand_trainer(algo=algo("separate"), critic=adapted)
    names = trainer.critic.state_dict()["trunk"]
    assert names and all("lora_" in name for name in names)
    assert len(trainer.critic.parameters()) == len(names) + 2  # and the head


# --- who feels whose gradient ---


async def policy_after_a_step(variant, value_coeff):
    """With a head that says something already: from a head of zeros no gradient goes on to any trunk."""
    trainer = hand_trainer(
        ppo_batch(0, scale=30.0),
        algo=algo(variant, value_coeff=value_coeff),
        cfg={"max_grad_norm": 0.1},
        **critic_for(variant),
    )
    torch.nn.init.normal_(trainer.critic.head.linear.weight, generator=torch.Generator().manual_seed(0))
    stats = await trainer.train_step()
    return [p.detach().clone() for p in trainer.model.parameters()], stats


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "shared"])
async def test_value_loss_of_a_separate_critic_does_not_change_the_policy(variant):
    """However much the value loss counts, bit for bit; the gradients are large, so both are clipped."""
    (a, few), (b, many) = [await policy_after_a_step(variant, coeff) for coeff in (0.5, 500.0)]
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert few["train/grad_norm"] == many["train/grad_norm"] > 0.1
    assert many["train/critic_grad_norm"] == pytest.approx(1000 * few["train/critic_grad_norm"], rel=1e-4)


async def test_value_loss_trains_a_shared_trunk_and_is_clipped_with_it():
    (a, few), (b, many) = [await policy_after_a_step("shared", coeff) for coeff in (0.5, 500.0)]
    assert not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert many["train/grad_norm"] > 10 * few["train/grad_norm"] and "train/critic_grad_norm" not in few


async def test_critic_lr_is_the_rate_of_the_critics_weights():
    """Adam's first steps move a weight by about the rate, whatever its gradient. The trunk's first gradient is zero: so is
    the head."""
    cfg = {"lr": 1e-4, "critic_lr": 1e-2, "weight_decay": 0.0}
    trainer = hand_trainer(ppo_batch(0), ppo_batch(0), algo=algo("separate"), cfg=cfg, critic=tiny_llama(seed=7))
    before = weights_of(trainer)
    await trainer.train()
    moved = [float((new - old).abs().max()) for new, old in zip(weights_of(trainer), before, strict=True)]
    num = len(list(trainer.model.parameters()))
    assert all(0 < most < 2.1e-4 for most in moved[:num]) and all(5e-3 < most < 2.1e-2 for most in moved[num:])


# --- and the rest ---


def test_separate_critic_with_the_policys_weights_equals_the_shared_one():
    """Two paths to the same number: the policy's hidden states, and those of its copy."""
    model = tiny_llama()
    shared = hand_trainer(algo=algo("shared"), model=model)
    apart = hand_trainer(algo=algo("separate"), model=model, critic=deepcopy(model))
    torch.nn.init.normal_(shared.critic.head.linear.weight)
    apart.critic.head.load_state_dict(shared.critic.head.state_dict())
    batch = shared.policy.batch(ppo_batch(3))
    with torch.no_grad():
        hidden = shared.policy.action_hidden(batch)
        expected = shared.critic.values(batch, hidden, shared.policy)
        assert torch.equal(apart.critic.values(batch, None, apart.policy), expected) and bool(expected.any())
        assert torch.equal(shared.critic.values(batch, None, shared.policy), expected)


def test_explained_variance_by_hand_and_merged_from_parts():
    # R = (1, 2, 3, 6), V = (1, 1, 3, 3): residuals 0, 1, 0, 3, variance 10/4 − 1 = 1.5; Var R = 50/4 − 9 = 3.5. 1 − 3/7.
    def part(returns, values):
        attached = SampleAttachments(token_returns=np.array(returns), token_values=np.array(values))
        return SAWItem([0] * (len(returns) + 1), None, [0] + [1] * len(returns), 0.0, {}, attached)

    whole, halves = MetricSums(), MetricSums()
    whole.add(value_moments([part([1, 2, 3, 6], [1, 1, 3, 3])]))
    halves.add(value_moments([part([1, 2], [1, 1])]))
    halves.add(value_moments([part([3, 6], [3, 3])]))
    for sums in (whole, halves):
        assert explained_variance(sums.means()) == pytest.approx({"value/explained_variance": 1 - 3 / 7})
    same = MetricSums()
    same.add(value_moments([part([2, 2], [0, 1])]))
    assert explained_variance(same.means()) == {}, "nothing varies, so there is nothing to explain"


def test_critic_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="give Trainer\\(critic=model\\)"):
        hand_trainer(algo=algo("separate"))
    model = tiny_llama()
    with pytest.raises(ConfigError, match="another one than the policy"):
        hand_trainer(algo=algo("separate"), model=model, critic=model)
    with pytest.raises(ConfigError, match="has a critic on the policy itself"):
        hand_trainer(algo=algo("shared"), critic=tiny_llama())
    with pytest.raises(ConfigError, match="has no critic"):
        hand_trainer(critic=tiny_llama())
    with pytest.raises(ConfigError, match="critic_lr=0.1, but"):
        hand_trainer(cfg={"critic_lr": 0.1})
    with pytest.raises(ConfigError, match="has 100 tokens and the policy 264"):
        hand_trainer(algo=algo("separate"), critic=tiny_llama(vocab_size=100))
    with pytest.raises(ConfigError, match="not supported for a policy spread over ranks"):
        policy, critic = hand_trainer().policy, tiny_llama(seed=7)
        make_critic(critic, algo("separate"), policy, TrainerConfig(), is_spread=True)
    with pytest.raises(ConfigError, match="there are tokens, turns"):
        make_ppo(over="episodes")
    with pytest.raises(ConfigError, match="there are shared, detached, separate"):
        make_ppo(critic="twin")


@every_variant
async def test_micro_token_budget_does_not_change_the_ppo_update(variant):
    weights = []
    for budget in (64, 512):
        trainer = hand_trainer(
            ppo_batch(0), ppo_batch(1), algo=algo(variant), cfg={"micro_token_budget": budget}, **critic_for(variant)
        )
        await trainer.train()
        weights.append(weights_of(trainer))
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*weights, strict=True))


def test_output_layer_of_a_separate_critic_is_not_trained():
    model = tiny_llama(seed=7)
    trainer = hand_trainer(algo=algo("separate"), critic=model)
    trained = {id(p) for p in trainer.critic.parameters()}
    assert id(model.lm_head.weight) not in trained and id(model.model.embed_tokens.weight) in trained
