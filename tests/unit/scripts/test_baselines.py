"""benchmarks/baselines.py: every command is one that `ludic train` accepts, finished runs are left alone, the table is of the files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from benchmarks import baselines

from ludic.cli.main import find_command

SAMPLE = {"question": "What is 1 + 1?", "answer": "#### 2"}


@pytest.fixture
def settings(tmp_path: Path) -> baselines.Settings:
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(SAMPLE)}\n" * 40)
    return baselines.Settings(
        model="tiny", data=data, eval_data=data, batches=2, rollouts=16, runs=tmp_path / "runs", results=tmp_path / "results"
    )  # fmt: skip


def finished(accuracy: float, *, rewards: list[float], at_start: bool = False) -> list[dict[str, float]]:
    """The rows of a run with two updates on every batch."""
    update = {
        "train/avg_completion_length": 10.0,
        "train/target_rollouts": 16.0,
        "train/entropy": 0.5,
        "perf/step_s": 2.0,
    }
    rows = [
        {"step": 2 * batch + part, "train/batch_index": float(batch), "train/avg_total_reward": reward, **update}
        for batch, reward in enumerate(rewards)
        for part in (1, 2)
    ]
    end = {"eval/accuracy": accuracy, "eval/over_limit_rate": 0.25, "eval/mean_completion_tokens": 7.0}
    start = {"step": 0, "eval/accuracy": 0.125, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.2}
    return [*([start] if at_start else []), *rows, {"step": 2 * len(rewards), **end}]


def write(settings: baselines.Settings, name: str, rows: list[dict[str, float]]) -> None:
    settings.results.mkdir(exist_ok=True)
    (settings.results / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.slow
def test_every_command_is_accepted_and_asks_for_the_same_rollouts(settings, capsys):
    baselines.write_questions(settings)
    assert baselines.question_file(settings).read_text().count("\n") == 4  # of 2 × 16 rollouts, eight each
    for algo in baselines.GROUP_SIZES:
        command, *args = baselines.command(settings, algo, 0)
        assert find_command([command])([*args, "--dry-run"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"with {algo}" in said and "32 episodes" in said, algo


def test_finished_runs_are_not_run_again(settings, capsys, monkeypatch):
    begun = []
    monkeypatch.setattr(baselines, "run_one", lambda settings, algo, seed: bool(begun.append((algo, seed))) or True)
    write(settings, "spo_1", finished(0.5, rewards=[0.5]))
    baselines.main(replace(settings, only=("grpo", "spo"), seeds=(0, 1), parallel=1))
    assert begun == [("grpo", 0), ("spo", 0), ("grpo", 1)]
    assert "1 of 4 runs are done" in capsys.readouterr().out


def test_no_run_begins_that_would_end_too_late(settings, capsys, monkeypatch):
    monkeypatch.setattr(baselines, "run_one", lambda *_: pytest.fail("it began"))
    settings.results.mkdir()
    baselines.main(replace(settings, only=("grpo",), seconds=0.0))
    assert "No time left for 3 runs" in capsys.readouterr().out


def test_the_table_has_mean_and_range_of_the_seeds_best_first(settings, capsys):
    write(settings, "grpo_0", finished(0.5, rewards=[0.0, 0.4], at_start=True))
    write(settings, "grpo_1", finished(0.75, rewards=[0.2, 0.6]))
    write(settings, "rloo_0", finished(0.875, rewards=[0.5, 0.5]))
    baselines.main(replace(settings, table=True))
    said = capsys.readouterr().out
    assert "Before training: 12.5 % [10.0, 20.0]" in said
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["rloo", "grpo"]
    assert rows[1] == ["grpo", "2", "62.5", "50.0 – 75.0", "0.300", "25.0", "7", "0.500", "0.00", "0.00", "8"]
