"""Each plug-in: its entry points lead somewhere, the wheel holds it, and a stranger's package has the same doors."""

import importlib
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
POINTS = [
    (group, name, target)
    for group, points in PROJECT["project"]["entry-points"].items()
    for name, target in points.items()
]
PACKAGES = {folder.relative_to(ROOT).as_posix() for folder in ROOT.glob("plugins/*/ludic_*")}


@pytest.mark.parametrize(("group", "name", "target"), POINTS)
def test_an_entry_point_names_an_object(group, name, target):
    module, _, attribute = target.partition(":")
    if name == "head_kernels":
        pytest.importorskip("triton")
    found = importlib.import_module(module)
    assert not attribute or getattr(found, attribute) is not None


def test_the_wheel_holds_the_core_and_every_plugin(tmp_path):
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == {"src/ludic", *PACKAGES}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {Path(package).name for package in PACKAGES} | {"ludic"} == {n for n in inside if "." not in n}
    assert "ludic_view/page/index.html" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize(
    "folder", sorted(Path(ROOT / package).parent for package in PACKAGES), ids=lambda folder: folder.name
)
def test_a_plugin_has_code_tests_and_a_page(folder):
    assert (folder / f"ludic_{folder.name}" / "plugin.py").is_file() or folder.name in ("gpu", "tinker", "vllm")
    assert list((folder / "tests").rglob("test_*.py")) and not list((folder / "tests").rglob("__init__.py"))
    page = (folder / "README.md").read_text().strip().splitlines()
    assert page[0].startswith(f"# ludic_{folder.name}") and len(page) <= 14
    assert page[-1].startswith("Without this plug-in:")


def test_a_strangers_package_adds_a_command_and_an_env(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(ROOT / "examples" / "plugin")], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def ludic(*arguments: str) -> str:
        command = [sys.executable, "-m", "ludic.cli.main", *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ludic("roll", "7") == "3 2\n" and "Roll two dice." in ludic("--help-all")
    assert "e" in ludic("play", "dice-for-ludic/dice", "--watch", "--seed", "1")
