"""Training in bitwise mode: before every update sampler and trainer agree exactly, and it learns as the usual mode does."""

import logging
from dataclasses import replace

import pytest

from ludic.run import build
from ludic.training import TrainerConfig, make_grpo, make_ppo
from ludic.types import ConfigError
from tests.unit.training.bandit import bandit_trainer, hand_trainer, tiny_llama
from tests.unit.training.samples import random_items

pytestmark = pytest.mark.slow

ZERO = ("kl_actor_policy", "kl_actor_policy_k1", "logp_difference_abs", "log_perplexity_gap_abs", "chi_square")
ONE = ("ratio_token_mean", "ratio_sequence_mean", "ratio_geometric_mean", "ess", "ess_sequence")


def config(**settings):
    return TrainerConfig(**{"lr": 1e-2, "max_seq_len": 64, "weight_decay": 0.0, **settings})


async def rows_of(num_steps, algorithm, **settings):
    trainer, engine = bandit_trainer(algorithm, group_size=4, num_prompts=8, model=tiny_llama(), cfg=config(**settings))
    rows = [await trainer.train_step() for _ in range(num_steps)]
    engine.close()
    return rows


async def test_sampler_and_trainer_agree_exactly_before_every_update_and_it_learns_as_usual(caplog):
    with caplog.at_level(logging.WARNING):
        rows = await rows_of(6, make_grpo(group_size=4), bitwise=True)
    assert not [record for record in caplog.records if "disagree" in record.message]
    for row in rows:
        assert {name: row[f"train/{name}"] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert {name: row[f"train/{name}"] for name in ONE} == dict.fromkeys(ONE, 1.0)
    usual = await rows_of(6, make_grpo(group_size=4))
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in usual], rel=1e-2, abs=1e-4)
    assert rows[-1]["train/entropy"] < rows[0]["train/entropy"]


async def test_critic_and_gradient_checkpointing_keep_the_bits():
    rows = await rows_of(2, make_ppo(), bitwise=True, gradient_checkpointing=True)
    assert [row["train/logp_difference_abs"] for row in rows] == [0.0, 0.0]


async def test_samples_of_another_sampler_are_warned_of(caplog):
    trainer = hand_trainer(random_items([12, 20]), cfg={"bitwise": True})
    with caplog.at_level(logging.WARNING):
        await trainer.train_step()
    assert "Sampler and trainer disagree" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"compile": True}, "bitwise=True and compile=True"),
        ({"packed": False}, "bitwise=True and packed=False"),
    ],
)
def test_settings_that_choose_another_computation_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        config(bitwise=True, **settings)


def test_loss_on_whole_logits_is_refused():
    class OnLogits:
        def compute(self, logits, batch):
            raise AssertionError("refused before it is called")

    algorithm = replace(make_grpo(group_size=4), loss=OnLogits())
    with pytest.raises(ConfigError, match="loss on whole logits, which bitwise=True does not cover"):
        hand_trainer(random_items([12]), algo=algorithm, cfg={"bitwise": True})


@pytest.mark.parametrize("engine", ["vllm", "pipeline"])
def test_other_engines_are_refused_by_name(engine, tmp_path):
    with pytest.raises(ConfigError, match=f"bitwise needs engine = 'local'.*the engine is '{engine}'"):
        build(env="tic_tac_toe", model="tiny", bitwise=True, engine=engine, runs=tmp_path)
