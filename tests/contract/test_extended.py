"""Every test that `make test` leaves out names a test of the default tier that covers its part; and a run says what it left out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
OF_THE_TIER = re.compile(r"mark\.extended|from tests\.extended import .*\bcases\b")
COVERED_BY = re.compile(r'covered_by="((?:tests|plugins)/[^:"]+)::')


def files_to_collect() -> list[str]:
    """Those with extended tests, and those that cover them."""
    paths = [*TESTS.rglob("test_*.py"), *TESTS.parent.glob("plugins/*/tests/**/test_*.py")]
    texts = {path.relative_to(TESTS.parent).as_posix(): path.read_text() for path in paths}
    marked = {path: text for path, text in texts.items() if OF_THE_TIER.search(text) and path != own_path()}
    return sorted({*marked, *(named for text in marked.values() for named in COVERED_BY.findall(text))})


def own_path() -> str:
    return Path(__file__).relative_to(TESTS.parent).as_posix()


@pytest.mark.slow
def test_what_covers_an_extended_test_exists_and_is_in_the_default_tier(tmp_path):
    files = files_to_collect()
    assert not [file for file in files if not (TESTS.parent / file).exists()]
    listing = tmp_path / "tiers.json"
    process = forked.python("-m", "tests.extended", listing, *files, cwd=TESTS.parent)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    tiers = json.loads(listing.read_text())
    default = {nodeid for case in tiers["default"] for nodeid in (case, case.split("[", 1)[0])}
    assert tiers["extended"], "no test is extended; then make test needs no second tier"
    assert not {test: named for test, named in tiers["extended"] if named not in default}


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A test with three cases, two of them extended; both fail."""
    (tmp_path / "conftest.py").write_text(
        "from tests.extended import LeftOut\n\n\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'extended')\n"
        "    config.pluginmanager.register(LeftOut())\n"
    )
    (tmp_path / "test_numbers.py").write_text(
        "import pytest\nfrom tests.extended import cases\n\n\n"
        "@pytest.mark.parametrize('number', cases([1, 2, 3], default=[2]))\n"
        "def test_number(number):\n    assert number == 2\n"
    )
    return tmp_path


def said_by(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, folder]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "1"]], ids=["alone", "in a worker"])
def test_a_run_says_how_many_it_left_out_and_how_to_run_them(numbers, workers):
    said = said_by(numbers, *workers, "-m", "not extended")
    assert "1 passed" in said and "failed" not in said, said
    assert "2 extended tests were left out: they did not run and do not count as passed. `make test-all` runs" in said


@pytest.mark.slow
def test_a_run_of_everything_leaves_nothing_out(numbers):
    said = said_by(numbers)
    assert "2 failed, 1 passed" in said and "left out" not in said, said
