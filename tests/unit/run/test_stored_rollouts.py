"""`ludic train --rollouts`: training on stored and rescored episodes instead of playing."""

import asyncio
from pathlib import Path

import pytest
import torch

from ludic.models.loading import make_tiny
from ludic.rewards import Rewards, as_scorer
from ludic.run import RunConfig, build
from ludic.training import TrainerConfig
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError
from ludic_judges.rescoring import rescore
from tests.unit.run.test_run import SMALL, Letter

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def is_digit(rollout) -> float:
    return float(rollout.agent_steps[-1].action.isdigit())


def weights_after(name: str, **settings) -> dict[str, torch.Tensor]:
    """After one update; Adam's eps of 1 makes it proportional to the gradient, which differs by rounding only."""
    model = make_tiny(seed=0)
    config = RunConfig(trainer=TrainerConfig(eps=1.0))
    with build(
        config, env=Letter, **{**SMALL, "lr": 1.0, "model": model, "name": name, "rollouts_per_update": 64, **settings}
    ) as run:
        run.train(steps=1)
    return {name: value.detach().clone() for name, value in model.model.named_parameters()}


def test_stored_episodes_give_the_update_of_the_run_that_played_them_and_rescored_ones_another():
    played = weights_after("played")
    (file,) = Path("runs/played/rollouts").iterdir()
    stored = weights_after("stored", rollouts=(file,), rollouts_per_update=64)
    found = asyncio.run(rescore([file], Path("digits.jsonl.gz"), Rewards([as_scorer(is_digit)], {"env": 0.0})))
    assert 0 < found.after < 1 and found.after != found.before, "some of the tiny model's letters are digits"
    rescored = weights_after("rescored", rollouts=(Path("digits.jsonl.gz"),))
    for name, value in played.items():
        torch.testing.assert_close(stored[name], value, rtol=0, atol=1e-6)
    assert any((rescored[name] - value).abs().max() > 1e-4 for name, value in played.items())
    assert not Path("runs/stored/rollouts").exists(), "nothing was played"
    (row,) = [row for row in read_metrics(Path("runs/rescored/metrics.jsonl")) if "train/loss" in row]
    assert row["train/avg_total_reward"] == pytest.approx(found.after)
    assert row["train/reward/is_digit"] == pytest.approx(found.after)


def not_a_digit(rollout) -> float:
    if is_digit(rollout):
        raise RuntimeError("A digit.")
    return float(rollout.agent_steps[-1].action.islower())


def test_groups_that_a_scorer_has_failed_are_not_trained_on(caplog):
    weights_after("played")
    (file,) = Path("runs/played/rollouts").iterdir()
    found = asyncio.run(rescore([file], Path("lower.jsonl.gz"), Rewards([as_scorer(not_a_digit)], {"env": 0.0})))
    assert 0 < found.num_failed < 16
    weights_after("lower", rollouts=(Path("lower.jsonl.gz"),), rollouts_per_update=8)
    assert "of 16 groups are left out" in caplog.text


def test_a_file_that_is_not_there_is_named():
    with (
        pytest.raises(ConfigError, match="there is no such file"),
        build(env=Letter, **SMALL, rollouts=(Path("x.jsonl"),)) as run,
    ):
        run.train(steps=1)
