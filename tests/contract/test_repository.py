"""What the README promises is what the repository has."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ludic.types.errors import DISTRIBUTION, MissingExtra

pytestmark = pytest.mark.slow

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
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        mentioned = set(re.findall(r"`make ([a-z-]+)`|^\s*make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
        names = {a or b for a, b in mentioned}
        assert names <= make_targets(), f"{page.name} speaks of {names - make_targets()}"


def test_ci_runs_the_same_command_as_the_readme():
    commands = [
        line.removeprefix("exec ")
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if "make " in line and "#" not in line
    ]
    assert commands == ["make test LOCKED=1", "make test-docs LOCKED=1", "make test-processors LOCKED=1"]


def test_the_tree_in_the_readme_is_the_tree():
    tree = README.split("## What is where", 1)[1].split("```")[1]
    listed = set(re.findall(r"^(?:  )?([\w./-]+)  ", tree, flags=re.MULTILINE))
    inside = {name for name in listed if (ROOT / "src" / "ludic" / name.rstrip("/")).exists()}
    outside = {
        name for name in listed if any((place / name.rstrip("/")).exists() for place in (ROOT, ROOT / "plugins"))
    }
    assert listed == inside | outside, f"not there: {listed - inside - outside}"
    packages = {p.name for p in (ROOT / "src" / "ludic").iterdir() if p.is_dir() and not p.name.startswith("__")}
    plugins = {folder.name for folder in (ROOT / "plugins").iterdir()}
    assert packages | plugins <= {name.rstrip("/") for name in listed}


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
    pages = ("*.md", "docs/**/*.md", "skills/*/SKILL.md", "examples/**/README.md")
    for page in [page for pattern in pages for page in ROOT.glob(pattern)]:
        prose = re.sub(r"```.*?```|^    .*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "AGENTS.md",
        "CODE_OF_CONDUCT.md",
        ".github/pull_request_template.md",
        "constraints.txt",
        ".pre-commit-config.yaml",
    ],
)
def test_the_usual_files_are_there(name):
    assert (ROOT / name).stat().st_size > 0


def test_the_project_file_says_what_the_issue_asks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11" and project["license"] == "Apache-2.0"
    assert {"hf", "math", "dev"} <= project["optional-dependencies"].keys()


def written_files() -> list[Path]:
    """What users read: code, pages, scripts and manifests."""
    folders = ("src", "plugins", "environments", "docs", "examples", "scripts", "deploy", "requirements")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if "tests" not in file.parts]
    read = {".py", ".md", ".sh", ".yaml", ".toml", ".txt", ".sbatch"}
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(file for file in files if file.suffix in read)]


def test_every_extra_that_an_error_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        (file.name, extra)
        for file in written_files()
        for given in re.findall(
            r"""(?:(?:MissingExtra|how_to_install|need_extras)\(\s*|\bextra=)["'](\w[\w,-]*)["']""", file.read_text()
        )
        for extra in given.split(",")
    }
    assert {extra for _, extra in named} >= {"search", "train", "endpoint", "pipeline"}
    assert not {(file, extra) for file, extra in named if extra not in extras}
    for extra in extras:
        said = str(MissingExtra(extra, "That"))
        assert f"pip install -e '.[{extra}]'" in said and f"pip install '{DISTRIBUTION}[{extra}] @ git+" in said


def test_no_text_installs_from_a_package_index_what_is_not_there():
    """`ludic` on PyPI is another project, and ludic-rl is on no index: a clone and git work."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION != "ludic"
    inside = [extra for one in project["optional-dependencies"].values() for extra in one if extra.startswith("ludic")]
    assert inside and all(extra.startswith(f"{DISTRIBUTION}[") for extra in inside)
    wrong = re.compile(rf"pip install[^\n`]*[ \t'\"](?:ludic\b(?!-)|{DISTRIBUTION}\b(?!(?:\[.*?\])? @ ))|\bludic\[\w")
    assert (
        wrong.search("pip install ludic") and wrong.search("pip install -U 'ludic[hf]'") and wrong.search("ludic[hf]")
    )
    assert wrong.search("pip install ludic-rl") and not wrong.search("pip install 'ludic-rl[hf] @ git+https://x'")
    found = {
        file.relative_to(ROOT).as_posix(): hit[0] for file in written_files() if (hit := wrong.search(file.read_text()))
    }
    assert not found


@pytest.mark.parametrize("missing", [True, False])
def test_system_packages_are_installed_without_questions_and_only_where_missing(tmp_path, missing):
    commands = {"id": "echo 0", "apt-get": 'echo "$DEBIAN_FRONTEND $@" >> ' + str(tmp_path / "ran")}
    commands |= {} if missing else {"bwrap": "true"}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = ROOT / "scripts" / "install_system.sh"
    done = subprocess.run(
        ["/bin/sh", script, "bwrap=bubblewrap", "id=coreutils"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    ran = (tmp_path / "ran").read_text().splitlines() if (tmp_path / "ran").exists() else []
    assert ran == (
        ["noninteractive update -q", "noninteractive install -y -q --no-install-recommends bubblewrap"]
        if missing
        else []
    )


def test_where_to_change_names_files_that_exist():
    """A name without a folder is in the folder of the name before it."""
    for row in (ROOT / "docs" / "where-to-change.md").read_text().splitlines():
        folder = ROOT
        for name in re.findall(r"`([\w/.]+(?:\.py|/))`", row):
            places = [ROOT / "src" / name, ROOT / "src" / "ludic" / name, ROOT / name, folder / name]
            found = [place for place in places if place.exists()]
            assert found, f"{name} in: {row}"
            folder = found[0] if found[0].is_dir() else found[0].parent


def test_every_example_folder_has_a_short_readme_with_its_command_and_its_cost():
    folders = [
        folder for folder in (ROOT / "examples").iterdir() if any(folder.glob("*.py")) or any(folder.glob("*.toml"))
    ]
    assert len(folders) >= 15
    for folder in folders:
        text = (folder / "README.md").read_text()
        assert f"examples/{folder.name}/" in text and "cost" in text.lower(), folder.name
        assert len(text.splitlines()) <= 40, folder.name


def test_the_picture_of_the_packages_shows_their_imports():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw_structure.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_says_what_lives_there():
    for init in (ROOT / "src" / "ludic").rglob("__init__.py"):
        text = init.read_text()
        assert not text or text.lstrip().startswith('"""'), f"{init} has no docstring"


def test_names_of_test_files_are_unique():
    """pytest imports test files by their name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
