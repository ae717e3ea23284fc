"""The rejection-sampling loop in one file: it learns, with one update of each sampling or several."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests import programs
from tests.extended import cases

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "rft.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return programs.load(SCRIPT)


@pytest.mark.parametrize("arguments", cases([[], ["--updates-per-round", "1"]], default=[[]]), ids=str)
def test_the_reward_goes_from_chance_to_nearly_always(program, arguments, tmp_path):
    assert program.main(["--runs", str(tmp_path), "--logger", "none", *arguments]) == 0
    rows = map(json.loads, (tmp_path / "rft" / "metrics.jsonl").read_text().splitlines())
    rewards = [row["train/avg_total_reward"] for row in rows]
    assert rewards[0] < 0.65 and rewards[-1] > 0.9
