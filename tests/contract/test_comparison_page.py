"""The comparison page: every yes and partly of Ludic names a file or test that is there, and every footnote has a source."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
CODE = re.compile(r"`([^`]+)`")
COLUMNS = ["", "Ludic", "TRL", "verl", "prime-rl + verifiers", "SkyRL", "tinker-cookbook"]


def rows_of(text: str) -> list[list[str]]:
    """The cells of each row of each table, heads and rules included."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


ROWS = [row for row in rows_of(PAGE.read_text(encoding="utf-8")) if row != COLUMNS and set(row) != {"---"}]


def is_there(name: str) -> bool:
    """Whether `path` or `path::test` exists."""
    path, _, test = name.partition("::")
    file = ROOT / path
    return file.is_file() and (not test or f"def {test}(" in file.read_text(encoding="utf-8"))


def test_every_row_has_a_cell_for_every_project():
    assert len(ROWS) > 40
    assert [row[0] for row in ROWS if len(row) != len(COLUMNS) or not all(row)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_ludics_cell_names_files_that_exist_or_says_no(row):
    cell = row[1]
    named = CODE.findall(cell)
    assert named or cell.startswith("no"), f"{row[0]}: a yes or partly needs a file or test: {cell}"
    assert [name for name in named if not is_there(name)] == []


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`((?:tests|plugins/\w+/tests)/[^`]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 60 and [name for name in named if not is_there(name)] == []


def test_each_feature_that_is_not_compared_has_one_test_beside_it():
    section = PAGE.read_text(encoding="utf-8").split("## Not compared\n")[1].split("\n## ")[0]
    bullets = [" ".join(bullet.split()) for bullet in section.split("\n- ")[1:]]
    features = [feature for bullet in bullets for feature in bullet.split("; ")]
    assert len(features) > 29
    assert [
        one for one in features if not re.fullmatch(r"[^`:]+: `(?:tests|plugins/\w+/tests)/[\w/]+\.py::test_\w+`", one)
    ] == []


def test_a_missing_file_and_a_missing_test_are_found():
    assert is_there("tests/contract/test_comparison_page.py::test_a_missing_file_and_a_missing_test_are_found")
    assert not is_there("tests/contract/test_comparison_page.py::test_that_is_not_there")
    assert not is_there("tests/contract/no_such_file.py")


def test_other_projects_cells_have_a_source_and_every_footnote_is_used():
    text = PAGE.read_text(encoding="utf-8")
    defined = set(re.findall(r"^\[\^([\w-]+)\]: ", text, re.MULTILINE))
    used = {name for row in ROWS for cell in row for name in re.findall(r"\[\^([\w-]+)\]", cell)}
    assert used == defined
    without = {"?", "–", "service", "yes", "yes, service", "its client", "in the client", "yes, by the service"}
    assert [(row[0], cell) for row in ROWS for cell in row[2:] if "[^" not in cell and cell not in without] == []
