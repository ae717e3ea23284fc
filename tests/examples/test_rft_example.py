"""The rejection-sampling loop in one file: it learns, with one update of each sampling or several."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="the local extra is not installed")
pytest.importorskip("tyro", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "rft.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rft_program", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arguments", [[], ["--updates-per-round", "1", "--rounds", "30"]], ids=str)
def test_the_reward_goes_from_chance_to_nearly_always(program, arguments, capsys):
    program.main(program.tyro.cli(program.Settings, args=arguments))
    rewards = [float(found) for found in re.findall(r"reward ([0-9.]+)", capsys.readouterr().out)]
    assert rewards[0] < 0.65 and rewards[-1] > 0.9
