"""DPO, IPO and KTO on stored preferences: the gap of the implied rewards grows."""

import json
from pathlib import Path

import pytest

from tests import programs
from tests.extended import cases

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "dpo.py"


@pytest.fixture(scope="module")
def program():
    return programs.load(SCRIPT)


@pytest.mark.parametrize("algo", cases(["dpo", "ipo", "kto"], default=["dpo", "kto"]))
def test_the_gap_grows(program, algo, tmp_path):
    program.main(data="demo", algo=algo, model="tiny", out=tmp_path, lr=1e-3, steps=8)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    if algo == "kto":
        gaps = [row["train/wanted_reward"] - row["train/unwanted_reward"] for row in rows]
    else:
        gaps = [row["train/margin"] for row in rows]
    assert abs(gaps[0]) < 1e-3 and gaps[-1] > 0.05, gaps


def test_data_of_the_wrong_kind_is_refused(program, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    with pytest.raises(Exception, match="kto learns from labels"):
        program.main(data=str(path), algo="kto", model="tiny", out=tmp_path / "run")
