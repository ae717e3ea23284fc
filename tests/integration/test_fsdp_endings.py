"""Ranks end together, at the same step, for a reason that each of them can say; and a run that lost a rank goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.integration.fsdp_scenarios import Run, train
from tests.integration.torchrun import torchrun

pytestmark = [pytest.mark.integration, pytest.mark.slow]
WORKER = "tests.integration.fsdp_endings"
ENDINGS = [
    "exhausted", "one_exhausted", "error", "signal", "empty", "one_empty", "other_lr", "other_model", "other_sources",
    "not_sharded", "no_evaluator", "evaluation", "publisher", "not_finite",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("endings")
    finished = forked.ranks(2, WORKER, str(where), *ENDINGS, timeout_s=180)
    assert finished.code == 0, finished.output[-6000:]
    return where


def reports(folder: Path, ending: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (json.loads((folder / f"{ending}-{rank}.json").read_text()) for rank in (0, 1))
    return first, second


@pytest.mark.parametrize(("ending", "step"), [("exhausted", 3), ("one_exhausted", 2)])
def test_a_source_without_more_requests_ends_all_ranks(folder, ending, step):
    for report in reports(folder, ending):
        assert (report["error"], report["step"]) == (None, step)


def test_a_signal_to_one_rank_ends_all_of_them_at_the_same_step(folder):
    first, second = reports(folder, "signal")
    assert first["error"] is second["error"] is None
    assert first["step"] == second["step"] in (2, 3)  # the batch that was there when it came may still be trained on


def test_an_error_on_one_rank_is_raised_there_and_named_on_the_others(folder):
    first, second = reports(folder, "error")
    assert second["error"] == "ValueError: the file of the third batch is gone"
    assert first["error"] == "RankFailed: Rank 1 failed: ValueError: the file of the third batch is gone"
    assert first["step"] == second["step"] == 2


def test_weights_that_are_not_finite_on_one_rank_end_all_of_them(folder):
    for report in reports(folder, "not_finite"):
        assert (
            report["error"].startswith("NotFinite: Step 2 has made weights that are not finite") and report["step"] == 2
        )
        assert "in model.norm.weight." in report["error"]


def test_batches_with_nothing_in_them_end_all_ranks(folder):
    for report in reports(folder, "empty"):
        assert report["error"].startswith("NothingToTrainOn: Rank 0 says: 2 batches in a row had nothing to train on")


def test_a_rank_whose_own_source_has_nothing_gets_a_share_of_the_others(folder):
    for report in reports(folder, "one_empty"):
        assert report["error"] is None and report["step"] == 2


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("other_lr", "TrainerConfig.lr is 0.01 on rank 0 and 0.001 on rank 1"),
        ("other_model", "the weight lm_head.weight is torch.float32[128, 32] on rank 0 and nothing on rank 1"),
        ("other_sources", "these have a batch source: [1]"),
        ("not_sharded", "shard_model(model)"),
        ("no_evaluator", "there is no evaluator"),
    ],
)
def test_ranks_that_were_started_differently_say_so_at_once(folder, ending, said):
    for report in reports(folder, ending):
        assert report["error"].startswith("ConfigError: ") and said in report["error"]


def test_a_publisher_that_fails_ends_all_ranks(folder):
    first, second = reports(folder, "publisher")
    assert first["error"] == "ConnectionError: the server is down"
    assert second["error"] == "RankFailed: Rank 0 could not publish: ConnectionError: the server is down"


def test_the_first_rank_evaluates_and_the_others_wait_and_hear_of_it(folder):
    for report in reports(folder, "evaluation"):
        assert report["error"] is None and report["step"] == 3
        assert report["eval"] == {"eval/score": 0.75, "eval/step": 3.0}


def test_an_error_in_the_middle_of_an_update_is_named_by_the_ranks_that_waited(tmp_path):
    finished = forked.ranks(2, WORKER, str(tmp_path), "broken_update", timeout_s=100)
    assert finished.code == 1, finished.output[-4000:]
    first, second = reports(tmp_path, "broken_update")
    assert second["error"] == "ArithmeticError: this rank has a bug"
    assert first["error"].startswith("RankFailed: Rank 1 failed: ArithmeticError: this rank has a bug")


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, forked.Finished]:
    where = tmp_path_factory.mktemp("killed")
    return where, torchrun(2, WORKER, str(where), "killed", timeout_s=150, flags=["--max-restarts=1"])


def test_a_rank_that_is_killed_is_named(killed):
    _, finished = killed
    assert "Rank 1 of 2 does not respond: it was killed" in finished.output


def test_a_run_that_lost_a_rank_goes_on_from_its_last_checkpoint(killed):
    folder, finished = killed
    assert finished.code == 0, finished.output[-6000:]
    resumed = [int((folder / f"resumed-{rank}-1").read_text()) for rank in (0, 1)]
    assert resumed[0] == resumed[1] and resumed[0] in (2, 3)  # the third may have been on its way to the disk
    expected = train(Run(steps=6), None)["history"][-1]
    for report in reports(folder, "killed"):
        assert (report["error"], report["step"]) == (None, 6)
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert report["stats"][name] == pytest.approx(expected[name], rel=1e-4), "as if nothing had happened"
