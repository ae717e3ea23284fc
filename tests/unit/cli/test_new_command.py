"""`ludic new env`: the package that it makes is installed, listed, tested and trained on."""

import os
import subprocess
import sys

import pytest

from tests import forked
from tests.unit.cli.runner import invoke

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("My-Env", "Take my_env?"),
        ("guessNumber", "Take guess_number?"),
        ("two__words", "Take two_words?"),
        ("7up", "begins with a small letter"),
        ("../outside", "Take outside?"),
        ("class", "module of Python"),
        ("math", "module of Python"),
        ("torch", "installed already"),
    ],
)
def test_bad_name_is_refused_with_advice(name, advice, tmp_path):
    done = invoke(["new", "env", name, "--into", str(tmp_path)])
    assert done.exit_code == 1 and advice in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_kept(tmp_path):
    (tmp_path / "my_env").mkdir()
    assert invoke(["new", "env", "my_env", "--into", str(tmp_path)]).exit_code == 0, "an empty folder is fine"
    file = tmp_path / "my_env" / "README.md"
    file.write_text("mine")
    done = invoke(["new", "env", "my_env", "--into", str(tmp_path)])
    assert "exists already" in str(done.exception) and file.read_text() == "mine"


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = invoke(["new", "env", "my_env", "--into", str(tmp_path / "file")])
    assert "Cannot write" in str(done.exception) and "--into" in str(done.exception)


@pytest.mark.slow
def test_new_package_is_installed_listed_tested_and_trained_on(tmp_path):
    made = invoke(["new", "env", "guess_number", "--into", str(tmp_path)])
    assert made.exit_code == 0 and "ludic train guess-number/guess_number" in made.output
    package, site = tmp_path / "guess_number", tmp_path / "site"
    for style in (["check", "--select", "E,F,I,UP,B"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *style, "--isolated", "--line-length", "132", "."]
        checked = subprocess.run(command, cwd=package, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    flags = ["--no-deps", "--no-build-isolation", "--no-compile", "--no-index", "--target", str(site)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", *flags, str(package)]
    subprocess.run(pip, check=True, capture_output=True)

    def ran(*command: str) -> str:
        """In a fresh interpreter: one of `forked` may have looked for packages already."""
        path = os.pathsep.join([str(site), str(forked.ROOT / "src")])
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "guess-number/guess_number" in ran("-m", "ludic.cli.main", "envs")
    assert "12 passed" in ran(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(package / "pyproject.toml"), str(package)
    )
    small = ["--group-size", "2", "--rollouts-per-update", "4", "--steps", "1", "--logger", "none", "--name", "first"]
    ran("-m", "ludic.cli.main", "train", "guess-number/guess_number", "--model", "tiny", *small)
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").is_file()
