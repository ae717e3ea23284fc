"""Two policies, one that proposes tasks: a small run writes its curve."""

import json
from pathlib import Path

import pytest

from tests import programs

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")

SCRIPT = Path(__file__).parents[2] / "examples" / "proposer_solver" / "proposer_solver.py"


@pytest.fixture(scope="module")
def program():
    return programs.load(SCRIPT)


@pytest.mark.slow
def test_a_small_run_writes_its_curve(program, tmp_path):
    assert program.main(["--out", str(tmp_path), "--updates", "3", "--episodes", "8"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(1 <= row["length"] <= 12 and 0 <= row["solved"] <= 1 and 0 <= row["reward"] <= 1 for row in rows)


def test_the_proposer_earns_most_for_what_half_of_the_solvers_manage(program):
    rewards = []
    for num_right in range(5):
        env = program.Letters()
        env.reset(seed=0)
        shown = env.step({"proposer": chr(12 * 8 + 1)})  # 1 + 97 % 12 = 2
        assert shown["solver_0"].obs == "2:" and env.active_agents == env.agent_ids[1:]
        answers = {f"solver_{n}": "ab1" if n < num_right else "a1b" for n in range(4)}
        outcomes = env.step(answers)
        assert [outcomes[f"solver_{n}"].reward for n in range(4)] == [float(n < num_right) for n in range(4)]
        rewards.append(outcomes["proposer"].reward)
    assert rewards == [0.0, 0.5, 1.0, 0.5, 0.0]
