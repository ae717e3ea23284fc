"""What the README promises is what the repository has."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.MULTILINE))


def test_the_set_up_commands_of_the_readme_are_exactly_two_make_targets():
    section = README.split("## Two commands", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"```(?:bash|sh)\n(.*?)```", section, flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]
    assert commands == ["make train", "make test"]
    assert {command.removeprefix("make ") for command in commands} <= make_targets()


def test_every_make_command_in_the_documents_exists():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        mentioned = set(re.findall(r"`make ([a-z-]+)`|^\s*make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
        names = {a or b for a, b in mentioned}
        assert names <= make_targets(), f"{page.name} speaks of {names - make_targets()}"


def test_ci_runs_the_same_command_as_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_tree_in_the_readme_is_the_tree():
    tree = README.split("## What is where", 1)[1].split("```")[1]
    listed = set(re.findall(r"^(?:  )?([\w./-]+)  ", tree, flags=re.MULTILINE))
    inside = {name for name in listed if (ROOT / "src" / "ludic" / name.rstrip("/")).exists()}
    outside = {name for name in listed if (ROOT / name.rstrip("/")).exists()}
    assert listed == inside | outside, f"not there: {listed - inside - outside}"
    packages = {p.name for p in (ROOT / "src" / "ludic").iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert packages <= {name.rstrip("/") for name in inside}


def test_the_example_in_the_readme_prints_what_the_readme_says(tmp_path):
    section = README.split("## A first environment", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (promised,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    script = tmp_path / "first_env.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == promised.strip()


def test_the_readme_describes_the_first_run_as_it_is():
    """What it prints in the end differs between kinds of CPU; its form and its size do not."""
    script = (ROOT / "examples" / "tic_tac_toe" / "first_run.py").read_text()
    assert "$(BIN)/python examples/tic_tac_toe/first_run.py" in MAKEFILE
    (games, updates) = re.findall(
        r"(\d+) games as X against a random opponent, before and after (\d+) updates", README
    )[0]
    assert f"eval_games: int = {games}\n" in script and f"updates: int = {updates}\n" in script
    shown = r"win +\d+\.\d% \[\d+\.\d%, \d+\.\d%\] +\d+\.\d% \[\d+\.\d%, \d+\.\d%\]"
    (win,) = re.findall(shown, README)
    before, after = re.findall(r"(\d+\.\d%) \[", win)
    assert f"Win rate {before} → {after}" in README


def test_the_env_of_the_readme_is_the_one_that_a_test_trains():
    """tests/unit/cli/test_train_process.py runs the page."""
    page = (ROOT / "docs" / "ludic-train.md").read_text()
    (code,) = re.findall(r"This file is `rps.py`:\n\n(```python\n.*?```)", README, flags=re.DOTALL)
    assert code in page
    (command,) = re.findall(r"ludic (train rps.py.*)", README)
    assert f"ludic {command}\n" in page


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        prose = re.sub(r"```.*?```|^    .*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt", ".pre-commit-config.yaml"]
)
def test_the_usual_files_are_there(name):
    assert (ROOT / name).stat().st_size > 0


def test_the_project_file_says_what_the_issue_asks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11" and project["license"] == "Apache-2.0"
    assert {"hf", "math", "dev"} <= project["optional-dependencies"].keys()


def test_every_extra_that_an_error_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in (ROOT / "src").rglob("*.py"):
        for extra in re.findall(r'MissingExtra\(\s*"(\w+)"', file.read_text()):
            assert extra in extras, f"{file.name} tells people to install ludic[{extra}]"
