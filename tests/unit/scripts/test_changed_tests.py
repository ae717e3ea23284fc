"""`make test-changed`: what a change can affect, by the imports."""

import subprocess

import pytest

from scripts import structure
from scripts.changed_tests import affected, changed_since


@pytest.fixture
def tree(tmp_path):
    files = {
        "src/ludic/__init__.py": "",
        "src/ludic/low.py": "",
        "src/ludic/high.py": "def make():\n    from ludic import low\n",
        "plugins/a/ludic_a/__init__.py": "",
        "plugins/a/tests/test_a.py": "",
        "plugins/b/ludic_b/__init__.py": "import ludic_a\n",
        "plugins/b/tests/test_b.py": "",
        "tests/fakes.py": "import ludic.high\n",
        "tests/conftest.py": "",
        "tests/contract/test_rules.py": "",
        "tests/unit/test_high.py": "from tests import fakes\nPAGE = 'docs/high.md'\n",
        "tests/unit/test_low.py": "from ludic.low import x\n",
    }
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return structure.Tree(tmp_path)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("src/ludic/low.py", "high low"),
        ("src/ludic/high.py", "high"),
        ("tests/fakes.py", "high"),
        ("tests/conftest.py", "high low"),
        ("docs/high.md", "high"),
        ("plugins/a/ludic_a/__init__.py", "a b"),
        ("plugins/b/ludic_b/__init__.py", "b"),
        ("research/log.md", ""),
        ("pyproject.toml", "a b high low"),
    ],
)
def test_a_change_affects_what_reaches_it_through_imports(tree, path, names):
    found = {file.rpartition("/test_")[2].removesuffix(".py") for file in affected({path}, tree)}
    assert found - {"rules"} == set(names.split()) and "rules" in found


def test_committed_changed_and_new_files_are_seen(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init", "-b", "main")
    for name in ("same", "changed", "committed"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    git("switch", "-c", "mine")
    (tmp_path / "committed").write_text("2")
    git("commit", "-am", "two")
    (tmp_path / "changed").write_text("2")
    (tmp_path / "new").write_text("1")
    assert changed_since("main", tmp_path) == {"committed", "changed", "new"}
