"""The distillation program on a tiny teacher: every kind of KL brings the student nearer on questions that it is not trained on."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests import programs
from tests.extended import cases

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "opd" / "distil.py"
TINY = ["--teacher", "tiny", "--steps", "12", "--eval-every", "12", "--eval-replies", "16"]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return programs.load(SCRIPT)


def kls(program: ModuleType, capsys: pytest.CaptureFixture, *arguments: str) -> list[float]:
    program.main(program.tyro.cli(program.Settings, args=[*TINY, *arguments]))
    return [float(found) for found in re.findall(r"^\| \d+ \| (-?[0-9.]+) \|", capsys.readouterr().out, re.MULTILINE)]


@pytest.mark.parametrize(
    "arguments",
    cases([["--kl", "reverse"], ["--kl", "forward", "--top-k", "30"]], default=[["--kl", "reverse"]]),
    ids=" ".join,
)
def test_a_student_with_some_of_the_layers_comes_nearer_to_the_whole(program, capsys, arguments):
    before, after = kls(program, capsys, "--student-layers", "2", "--lr", "3e-3", *arguments)
    assert after < 0.75 * before


def test_a_model_comes_nearer_to_itself_with_a_hint(program, capsys):
    before, after = kls(
        program, capsys, "--self-distillation", "--replies", "16", "--lr", "3e-3", "--eval-replies", "48"
    )
    assert before > 0.02 and after < 0.8 * before


def test_a_student_that_keeps_everything_is_refused(program):
    with pytest.raises(program.ConfigError, match="--student-layers 4: the teacher has 4"):
        program.main(program.Settings(teacher="tiny", student_layers=4))


def test_the_student_can_be_written_for_ludic_train(program, tmp_path):
    program.main(program.Settings(teacher="tiny", student_layers=2, save_student=tmp_path))
    model = program.load_model(str(tmp_path)).model
    assert len(model.model.layers) == model.config.num_hidden_layers == 2
