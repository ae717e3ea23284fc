"""The release script: what it writes, and what it refuses. Building is tried by hand (`--dry-run`)."""

import datetime
from pathlib import Path

import pytest

from scripts import release as script

ROOT = Path(__file__).parents[3]


DAY = datetime.date(2026, 11, 18)


def test_what_was_unreleased_moves_under_the_version():
    before = "# Changelog\n\n## Unreleased\n\n### Added\n- a\n\n## 0.1.0 · 2026-01-01\n- b\n"
    assert script.released(before, "0.2.0", DAY) == (
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 · 2026-11-18\n\n### Added\n- a\n\n## 0.1.0 · 2026-01-01\n- b\n"
    )


@pytest.mark.parametrize("changelog", ["# Changelog\n", "## Unreleased\n\n## 0.1.0\n- b\n"])
def test_without_unreleased_changes_there_is_no_release(changelog):
    with pytest.raises(script.NotReady):
        script.released(changelog, "0.2.0", DAY)


def test_the_version_of_the_repository_is_written_once_per_file():
    for name in script.WRITTEN[1:]:
        assert "9.9.9" in script.with_version((ROOT / name).read_text(), "9.9.9")
    with pytest.raises(script.NotReady, match="2 times"):
        script.with_version('version = "1"\nversion = "2"\n', "9.9.9")


@pytest.mark.parametrize(
    ("version", "tags", "changes", "problem"),
    [
        ("0.2", [], "", "is no version"),
        ("0.2.0", ["v0.1.0", "v0.2.0"], "", "tag v0.2.0 already"),
        ("0.2.0", [], " M README.md", "commit them first"),
    ],
)
def test_refusals(version, tags, changes, problem):
    with pytest.raises(script.NotReady, match=problem):
        script.check(version, tags, changes)
    script.check("0.2.0rc1", ["v0.1.0"], "")
