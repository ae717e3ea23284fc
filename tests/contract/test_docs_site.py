"""The docs site: its table of contents is complete, its links lead somewhere, and its API pages name what is public."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_the_index_lists_every_page_and_every_link_leads_somewhere():
    assert script.problems(ROOT / "docs") == []


def test_pages_are_short():
    """At most 25,000 words without code blocks and the bars of tables."""
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    prose = [re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE) for text in texts]
    assert sum(len(re.findall(r"\S*\w\S*", text)) for text in prose) <= 25_000


def test_problems_are_a_page_outside_the_index_and_a_dead_link(tmp_path):
    (tmp_path / "index.md").write_text("# Docs\n\n## Start\n\n- [A](a.md): first\n- [Gone](gone.md): not there\n")
    (tmp_path / "a.md").write_text(
        "[b](b.md) [dead](c.md#x) [web](https://example.org) [here](#first-part-of-3) [not](b.md#y)\n"
        "# First part (of 3)\n```\n[code](no.md)\n```\n"
    )
    (tmp_path / "b.md").write_text("text")
    assert script.problems(tmp_path) == [
        "index.md lists gone.md, which is not there",
        "a.md links to c.md#x, which is not there",
        "a.md links to b.md#y, which is not there",
        "index.md does not list b.md",
        "index.md links to gone.md, which is not there",
    ]


def test_links_out_of_the_docs_become_text(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("read me")
    (docs / "index.md").write_text("# Docs\n\n## Start\n\n- [A](a.md): first\n")
    (docs / "a.md").write_text("[the README](../README.md), [docs](index.md#start), [`README.md`](../README.md)")
    script.prepare(docs, tmp_path / "copy")
    assert (tmp_path / "copy" / "a.md").read_text() == "the README (`README.md`), [docs](index.md#start), `README.md`"


def test_llms_txt_follows_the_index_and_the_full_text_has_the_pages(tmp_path):
    entries = script.contents((ROOT / "docs" / "index.md").read_text())
    assert list(dict.fromkeys(entry.group for entry in entries)) == ["Start", "Guides", "Reference", "Internals"]
    script.write_llms(ROOT / "docs", entries, tmp_path)
    short, whole = (tmp_path / "llms.txt").read_text(), (tmp_path / "llms-full.txt").read_text()
    assert all(f"({entry.path}): {entry.about}" in short for entry in entries)
    assert (ROOT / "docs" / "algorithms" / "grpo.md").read_text().strip() in whole


def test_an_api_page_names_the_public_classes_of_its_package():
    page = script.api_page("ludic.interaction")
    assert page.startswith("# ludic.interaction\n") and "::: ludic.interaction." in page
    assert any(line.endswith(".SingleAgentProtocol") for line in page.splitlines())
