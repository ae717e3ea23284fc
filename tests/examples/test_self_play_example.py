"""Two players learn from each other in one file: a small run, stopped and resumed, ends in a table."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests import programs

pytest.importorskip("peft", reason="the lora extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "self_play" / "self_play.py"
SMALL = [
    "--synth-games",
    "60",
    "--warm-up-steps",
    "4",
    "--games",
    "12",
    "--snapshot-every",
    "2",
    "--rating-games",
    "2",
    "--rank",
    "4",
    "--league",
]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return programs.load(SCRIPT)


def run(program: ModuleType, *arguments: object) -> None:
    program.main([*SMALL, *map(str, arguments)])


@pytest.mark.extended(
    covered_by="tests/unit/run/test_mixtures.py::test_a_run_with_a_league_resumes_as_if_uninterrupted"
)
def test_a_resumed_run_rates_every_version_in_the_leagues(program, tmp_path, capsys):
    """It begins in a folder with the half-written games of a run that was stopped in its warm-up."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "games.jsonl").write_text("half a lin")
    run(program, "--out", out, "--updates", 2)
    assert (out / "base" / "config.json").exists()
    run(program, "--out", out, "--updates", 4, "--resume")
    said = capsys.readouterr().out
    assert re.findall(r"update +(\d+)", said) == ["1", "2", "3", "4"]
    table = (out / "elo.txt").read_text()
    rated = set(re.findall(r"^(\S+) +\d+  \[", table, flags=re.MULTILINE))
    assert rated == {f"past_{name}@{v}" for name in ("ann", "bob") for v in (0, 2, 4)} | {"random", "perfect"}
    assert re.search(r"^perfect", table.splitlines()[1]), "no player beats perfect play"
    assert (out / "metrics.jsonl").read_text().count("\n") == 4


def test_earlier_run_is_never_overwritten(program, tmp_path):
    with pytest.raises(program.ConfigError, match="exists already"):
        run(program, "--out", tmp_path)
    with pytest.raises(program.ConfigError, match="no run in"):
        run(program, "--out", tmp_path, "--resume")
