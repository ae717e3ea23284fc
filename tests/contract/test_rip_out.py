"""Each plug-in is taken out in turn: what is left works, and what is gone says so in one sentence.

The tree is copied without the plug-in. Processes run without site's .pth files, so that the installed tree cannot be imported.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.contract.test_public_names import NAMES

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
PLUGINS = sorted(folder.name for folder in (CHECKOUT / "plugins").iterdir())
A_COMMAND = {
    "envs": "env-server", "judges": "rescore", "ops": "plan", "pipeline": "launch", "sandbox": "sandbox-server",
    "serve": "gateway", "view": "view",
}  # fmt: skip
QUICK = ["tests/unit", "tests/golden", "-m", "not integration and not slow and not extended and not diagnostic"]
TRAIN = (
    "train tic_tac_toe --model tiny --set view=compact --steps 2 --rollouts-per-update 8 --group-size 4 --max-tokens 4 "
    "--logger print --name short"
)
IMPORT_NAMES = """
import importlib, json, sys
from ludic.types.errors import MissingPlugin

names, plugin = json.loads(sys.argv[1]), sys.argv[2]
try:
    importlib.import_module(plugin)
except ModuleNotFoundError:
    pass
else:
    sys.exit(f"{plugin} can be imported: this tests nothing")
for module, inside in names.items():
    loaded = importlib.import_module(module)
    for name in inside.split():
        try:
            getattr(loaded, name)
        except MissingPlugin as error:
            assert error.package == plugin, error
"""


class Tree:
    """A copy of the repository without one plug-in."""

    def __init__(self, place: Path, without: str) -> None:
        self.place = place
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        for folder in ("src", "tests", "examples", "docs"):
            shutil.copytree(CHECKOUT / folder, place / folder, ignore=unwanted)
        for file in ("pyproject.toml", "conftest.py", "README.md", "CONTRIBUTING.md"):
            shutil.copy(CHECKOUT / file, place / file)
        kept = [plugin for plugin in PLUGINS if plugin != without]
        for plugin in kept:
            shutil.copytree(CHECKOUT / "plugins" / plugin, place / "plugins" / plugin, ignore=unwanted)
        packages = [sysconfig.get_path("purelib")]
        paths = [place / "src", *(place / "plugins" / plugin for plugin in kept), place, *packages]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XDG_CACHE_HOME": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=self.place, env=self._environment, capture_output=True, text=True)

    def ludic(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "ludic.cli.main", *arguments)


@pytest.fixture(scope="module", params=PLUGINS)
def torn(request, tmp_path_factory) -> tuple[str, Tree]:
    return request.param, Tree(tmp_path_factory.mktemp(request.param), request.param)


def test_names_import_or_say_what_is_missing(torn):
    import json

    plugin, tree = torn
    done = tree.run("-c", IMPORT_NAMES, json.dumps(NAMES), f"ludic_{plugin}")
    assert done.returncode == 0, done.stderr


def test_commands_are_listed_and_the_missing_one_answers_in_a_sentence(torn):
    plugin, tree = torn
    shown = tree.ludic("--help-all")
    assert shown.returncode == 0 and "train" in shown.stdout, shown.stderr
    for other, command in A_COMMAND.items():
        assert (f"  {command} " in shown.stdout) == (other != plugin)
    if plugin in A_COMMAND:
        asked = tree.ludic(A_COMMAND[plugin])
        assert asked.returncode == 2 and asked.stderr.count("\n") == 1, asked.stderr
        assert f"is in the plug-in ludic_{plugin}, which is not installed" in asked.stderr


def test_two_updates_are_trained(torn):
    done = torn[1].ludic(*TRAIN.split())
    assert done.returncode == 0, done.stderr
    assert len((torn[1].place / "runs" / "short" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.extended(covered_by="test_two_updates_are_trained")
def test_quick_tests_of_the_core_pass(torn):
    done = torn[1].run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *QUICK)
    assert done.returncode == 0, done.stdout[-3000:]
