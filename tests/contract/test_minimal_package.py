"""`ludic.minimal` is read in one sitting, and costs little to import."""

import subprocess
import sys
from pathlib import Path

from tests.contract.test_imports import HEAVY, ludic_imports

PACKAGE = Path(__file__).parents[2] / "src" / "ludic" / "minimal"


def test_the_whole_loop_is_under_600_lines():
    """Without the examples, which are programs beside it."""
    lines = {file.name: len(file.read_text().splitlines()) for file in PACKAGE.glob("*.py")}
    assert sum(lines.values()) < 600, lines


def test_the_files_are_those_of_the_design():
    names = {"__init__", "rl", "generation", "training", "local_backend", "tinker_backend"}
    assert {file.stem for file in PACKAGE.glob("*.py")} == names
    assert {file.stem for file in PACKAGE.glob("examples/*.py")} == {"__init__", "gsm8k", "musique_search"}


def test_it_may_import_everything_but_the_command_line():
    assert not [file.name for file in PACKAGE.rglob("*.py") if "cli" in ludic_imports(file)]


def test_nothing_but_the_back_ends_loads_torch_or_the_tinker_sdk():
    modules = ["ludic.minimal", "ludic.minimal.examples.gsm8k", "ludic.minimal.examples.musique_search"]
    probe = f"import sys, {', '.join(modules)}; print({HEAVY | {'tinker'}!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_layers_import_only_those_below():
    """Envs import neither tokens nor models; generation imports no training."""
    above: dict[str, set[str]] = {"rl": set(), "generation": {"rl"}, "training": {"rl", "generation"}}
    for name, may in above.items():
        text = (PACKAGE / f"{name}.py").read_text()
        used = {
            line.split()[1].removeprefix("ludic.minimal.")
            for line in text.splitlines()
            if line.startswith("from ludic.minimal.")
        }
        assert used <= may, f"{name}.py reaches too far: {used - may}"
