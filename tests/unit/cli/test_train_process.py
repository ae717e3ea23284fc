"""`ludic train` in a separate process: killed, interrupted, and as docs/ludic-train.md shows it."""

import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from ludic.training.loggers import read_metrics
from tests import forked
from tests.contract.pages import BLOCK, DOCS
from tests.extended import cases
from tests.unit.cli.train_parts import CASES, ENV, SMALL

pytestmark = pytest.mark.slow
RUN = ["letter.py:Letter", *SMALL, "--lr", "1e-2", "--checkpoint-every", "3"]


def start(folder: Path, *arguments: str) -> forked.Forked:
    (folder / "letter.py").write_text(ENV)
    return forked.python("-m", "ludic.cli.main", "train", *arguments, cwd=folder)


def metrics(run: Path) -> list[dict[str, float]]:
    """What does not depend on the clock."""
    path = run / "metrics.jsonl"
    rows = list(read_metrics(path)) if path.exists() else []
    return [
        {name: value for name, value in row.items() if name != "time" and not name.startswith("perf/")} for row in rows
    ]


def wait_for_step(run: Path, step: int, process: forked.Forked) -> None:
    deadline = time.time() + 120
    while not any(row["step"] >= step for row in metrics(run)):
        assert process.poll() is None and time.time() < deadline, f"step {step} was never reached"
        time.sleep(0.01)


def test_killed_and_resumed_run_equals_an_uninterrupted_run(tmp_path):
    whole, broken = tmp_path / "runs" / "whole", tmp_path / "runs" / "broken"
    process = start(tmp_path, *RUN, "--steps", "12", "--name", "broken")
    wait_for_step(broken, 5, process)
    process.kill()
    process.wait()
    assert len(metrics(broken)) < 12, "it was too fast to be killed; this test has shown nothing"
    resumed = start(tmp_path, "runs/broken", "--resume")
    said, error = resumed.communicate(timeout=120)
    assert resumed.returncode == 0 and "Going on after update" in said, error
    assert start(tmp_path, *RUN, "--steps", "12", "--name", "whole").wait(timeout=120) == 0
    assert [row["step"] for row in metrics(whole)] == list(range(1, 13))
    assert metrics(broken) == metrics(whole)


def test_killed_and_resumed_run_of_two_policies_equals_an_uninterrupted_run(tmp_path):
    (tmp_path / "cases.py").write_text(CASES)
    pair = [
        "cases.py:Cases",
        *SMALL,
        "--lr",
        "1e-2",
        "--checkpoint-every",
        "2",
        "--eval-every",
        "1",
        "--eval-episodes",
        "2",
        "--policy",
        "ann=left",
        "--policy",
        "bob=right",
    ]
    process = start(tmp_path, *pair, "--steps", "7", "--name", "broken", "--policy", "bob.lr=3e-3")
    broken, whole = tmp_path / "runs" / "broken", tmp_path / "runs" / "whole"
    wait_for_step(broken, 3, process)
    process.kill()
    process.wait()
    assert len(metrics(broken)) < 14, "it was too fast to be killed; this test has shown nothing"
    resumed = start(tmp_path, "runs/broken", "--resume")
    said, error = resumed.communicate(timeout=120)
    assert resumed.returncode == 0 and "Going on after update" in said, error
    assert start(tmp_path, *pair, "--steps", "7", "--name", "whole", "--policy", "bob.lr=3e-3").wait(timeout=120) == 0
    rows = [[{k: v for k, v in row.items() if "/perf/" not in k} for row in metrics(run)] for run in (broken, whole)]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [step for step in range(1, 8) for _ in (1, 2)]
    assert all("bob/eval/mean_reward" in row for row in rows[0][1::2])
    for policy in ("ann", "bob"):
        last = [
            run / "policies" / policy / "checkpoints" / "step_000007" / "model.safetensors" for run in (broken, whole)
        ]
        assert last[0].read_bytes() == last[1].read_bytes()


@pytest.mark.parametrize(
    ("numbers", "code"),
    cases(
        [
            ([signal.SIGINT], 130),
            ([signal.SIGTERM, signal.SIGTERM], 143),  # GNU timeout: the process, then its group
            ([signal.SIGINT, signal.SIGTERM, signal.SIGINT], 130),  # Ctrl-C under torchrun or uv run
        ],
        default=[([signal.SIGINT, signal.SIGTERM, signal.SIGINT], 130)],
    ),
    ids=["once", "twice", "of both kinds"],
)
def test_repeated_signal_finishes_the_update_and_saves(tmp_path, numbers, code):
    run = tmp_path / "runs" / "long"
    process = start(tmp_path, *RUN, "--steps", "1000", "--name", "long")
    wait_for_step(run, 2, process)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.02)  # or the system makes one of two
    said, error = process.communicate(timeout=60)
    last = metrics(run)[-1]["step"]
    assert process.returncode == code, error
    assert error.count("stopping after this step") == 1
    assert f"Stopped after update {last} of 1000" in said and "To go on: ludic train runs/long --resume" in said
    assert (run / "checkpoints" / f"step_{last:06d}" / "manifest.json").is_file() and "Traceback" not in error


@pytest.mark.extended(
    covered_by="tests/unit/run/test_features.py::test_every_file_of_the_page_and_every_feature_in_a_file_runs"
)
def test_the_page_shows_a_run_that_learns(tmp_path):
    page = (DOCS / "ludic-train.md").read_text()
    blocks = BLOCK.findall(page)
    code = next(text for kind, text in blocks if kind == "python")
    command = next(text for kind, text in blocks if kind == "bash" and "rps.py" in text)
    program, *arguments = shlex.split(command)
    assert program == "ludic"
    (tmp_path / "rps.py").write_text(code)
    # With half of the rollouts it learns all the same, and in half of the time.
    process = forked.python(
        "-m", "ludic.cli.main", *arguments, "--rollouts-per-update", 64, "--logger", "none", cwd=tmp_path
    )
    said, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    first, last = map(float, re.findall(r"Reward: (\S+) in the first update, (\S+) in the last", said)[0])
    assert first < 0.2 and last > 0.9, said
    run = next((tmp_path / "runs").iterdir())
    rewards = [row["train/avg_total_reward"] for row in metrics(run)]
    assert sum(rewards[-10:]) / 10 > 0.9
