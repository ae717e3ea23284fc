"""Each plug-in is taken out in turn: what is left works, and what is gone says so in one sentence.

The tree is copied without the plug-in. Processes run without site's .pth files, so that the installed tree cannot be imported.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_public_names import NAMES
from tests.extended import cases

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
PLUGINS = sorted(package.parent.name for package in CHECKOUT.glob("plugins/*/ludic_*"))
A_COMMAND = {
    "envs": "env-server", "judges": "rescore", "ops": "plan", "pipeline": "launch", "sandbox": "sandbox-server",
    "serve": "gateway", "view": "view",
}  # fmt: skip
QUICK = ["tests/unit", "tests/golden", "-m", "not integration and not slow and not extended and not diagnostic"]
TRAIN = (
    "train tic_tac_toe --model tiny --set view=compact --steps 2 --rollouts-per-update 8 --group-size 4 --max-tokens 4 "
    "--logger print --name short"
)
IN_ONE_PROCESS = """
import contextlib, importlib, io, json, sys
from ludic.cli.main import main
from ludic.types.errors import MissingPlugin

names, plugin, command, train = json.loads(sys.argv[1])
try:
    importlib.import_module(plugin)
except ModuleNotFoundError:
    pass
else:
    sys.exit(f"{plugin} can be imported: this tests nothing")


def ludic(*arguments):
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["ludic", *arguments]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), err.getvalue()


wrong = []
for module, inside in names.items():
    loaded = importlib.import_module(module)
    for name in inside.split():
        try:
            getattr(loaded, name)
        except MissingPlugin as error:
            wrong += [] if error.package == plugin else [str(error)]
answers = {"wrong": wrong, "help": ludic("--help-all"), "train": ludic(*train.split())}
answers["command"] = ludic(command) if command else None
print("ANSWERS" + json.dumps(answers))
"""


class Tree:
    """A copy of the repository without one plug-in."""

    def __init__(self, place: Path, without: str) -> None:
        self.place = place
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        for folder in ("src", "tests", "examples", "docs", "scripts", "benchmarks"):
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


@dataclass(frozen=True)
class Torn:
    """What a tree without a plug-in answered."""

    plugin: str
    tree: Tree
    answers: dict[str, Any]


@pytest.fixture(scope="module", params=cases(PLUGINS, default=("gpu", "pipeline")))
def torn(request, tmp_path_factory) -> Torn:
    plugin = request.param
    tree = Tree(tmp_path_factory.mktemp(plugin), plugin)
    asked = json.dumps([NAMES, f"ludic_{plugin}", A_COMMAND.get(plugin), TRAIN])
    done = tree.run("-c", IN_ONE_PROCESS, asked)
    assert "ANSWERS" in done.stdout, done.stderr
    return Torn(plugin, tree, json.loads(done.stdout.partition("ANSWERS")[2]))


def test_names_import_or_say_what_is_missing(torn):
    assert torn.answers["wrong"] == []


def test_commands_are_listed_and_the_missing_one_answers_in_a_sentence(torn):
    code, shown, _ = torn.answers["help"]
    assert code == 0 and "  train " in shown
    for plugin, command in A_COMMAND.items():
        assert (f"  {command} " in shown) == (plugin != torn.plugin)
    if torn.answers["command"]:
        code, _, said = torn.answers["command"]
        assert code == 2 and said.count("\n") == 1, said
        assert f"is in the plug-in ludic_{torn.plugin}, which is not installed" in said


def test_two_updates_are_trained(torn):
    code, _, said = torn.answers["train"]
    assert code == 0, said
    assert len((torn.tree.place / "runs" / "short" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.extended(covered_by="test_two_updates_are_trained")
def test_quick_tests_of_the_core_pass(torn):
    """Without those that import the plug-in, or a package of environments/, which is not in the tree."""
    imports = re.compile(r"^(?:from|import) (ludic_\w+)", re.MULTILINE)
    there = {package.name for package in torn.tree.place.glob("plugins/*/ludic_*")}
    files = torn.tree.place.glob("tests/**/test_*.py")
    using = [file for file in files if {*imports.findall(file.read_text())} - there]
    ignored = [f"--ignore={file}" for file in using]
    done = torn.tree.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *QUICK, *ignored)
    assert done.returncode == 0, done.stdout[-3000:]
