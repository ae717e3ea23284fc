"""`ludic parts metric` lists every name that small runs log: of each preset, each source, a judge, a gateway's counts."""

import itertools

import pytest
from benchmarks.presets import RECIPES, Vocabulary, trainer_of

from ludic.batch_gen import (
    AsyncRolloutBatchSource,
    DynamicSampling,
    MixedBatchSource,
    MixedPart,
    ReplayBatchSource,
    Stragglers,
)
from ludic.batch_gen.build_batch import GATEWAY_KINDS
from ludic.batch_gen.requests.streams import RisingDifficultyCurriculum
from ludic.inference import LocalTeacher
from ludic.inference.local import LocalEngine
from ludic.rewards import Rewards
from ludic.training import make_grpo
from ludic.training.metric_names import METRICS
from ludic_judges import GroupJudge, PairwiseJudge
from plugins.judges.tests.cases import judge_model
from plugins.judges.tests.test_group_judges import by_length, longer_wins
from tests.extended import cases
from tests.unit.training.bandit import BanditRequests, bandit_trainer, tiny_llama, unexplained

pytestmark = pytest.mark.slow


async def logged(trainer, engine, *, updates=1):
    """The names of all updates."""
    names = [await trainer.train_step() for _ in range(updates)]
    engine.close()
    return {name: 0.0 for stats in names for name in stats}


@pytest.mark.parametrize("name", cases(RECIPES, default=["grpo", "gdpo", "ppo", "opd", "spo", "dpo", "sft"]))
@pytest.mark.slow
async def test_every_metric_of_a_preset_is_listed(name):
    engine = LocalEngine(tiny_llama(), Vocabulary(), max_model_len=64, kv_tokens=1024)
    stats = await logged(*trainer_of(name, LocalTeacher(engine), 0))
    assert "train/loss" in stats and unexplained(stats) == set()


@pytest.mark.parametrize(
    "judge", [GroupJudge(judge_model(by_length), "?"), PairwiseJudge(judge_model(longer_wins), "?")]
)
async def test_every_metric_of_a_judge_is_listed(judge):
    stats = await logged(*bandit_trainer(make_grpo(group_size=4), group_size=4, rewards=Rewards([judge])))
    assert {"train/judge/calls", "train/judge/position_bias", "train/num_unscored"} <= stats.keys()
    assert unexplained(stats) == set()


def replayed(source):
    mixed = MixedBatchSource([MixedPart(name="played", source=source, share=1)])
    return ReplayBatchSource(mixed, capacity=64, num_replayed=8)


def rising():
    (request,) = BanditRequests(1)()
    return RisingDifficultyCurriculum(
        lambda difficulty, seed: itertools.repeat({}), lambda number, sample: request, batch_size=4
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("train/replay_lag_mean", {"make_source": replayed}),
        ("train/played/num_mixed", {"make_source": replayed}),
        ("train/lag", {"make_source": AsyncRolloutBatchSource}),
        ("train/num_zero_variance_groups", {"generation": {"dynamic_sampling": DynamicSampling()}}),
        ("train/num_carried", {"generation": {"stragglers": Stragglers(close_at=0.5)}}),
        ("train/difficulty", {"curriculum": rising()}),
    ],
)
async def test_every_metric_of_a_source_is_listed(name, settings):
    trainer, engine = bandit_trainer(make_grpo(group_size=4), group_size=4, **settings)
    try:
        stats = await logged(trainer, engine, updates=2)
    finally:
        if close := getattr(trainer.batch_source, "close", None):
            await close()
    assert name in stats and unexplained(stats) == set()


def test_every_kind_of_a_gateways_calls_is_listed():
    assert {f"gateway/{kind}_rate" for kind in GATEWAY_KINDS} | {"gateway/calls", "gateway/raised_rate"} == {
        name for name in METRICS if name.startswith("gateway/")
    }
