import os
import subprocess
import sys

import pytest

from ludic.tools import Tool
from ludic.types import ConfigError
from ludic_envs.search import DocumentSearch

pytest.importorskip("bm25s", reason="the search extra is not installed")

TEXTS = [
    "The heron stands in the reeds of the river.",
    "The river carries ice in spring, and the ferry waits.",
    "Ferries were replaced by the bridge of 1911.",
    "The river, the river, the river.",
]


def test_rare_words_count_more_than_common_ones():
    assert DocumentSearch(TEXTS).top("heron river", k=2) == [0, 3]


def test_documents_without_a_word_of_the_query_are_not_found_however_many_are_asked_for():
    search = DocumentSearch(TEXTS)
    assert search.top("bridge", k=4) == [2]
    assert search.top("zeppelin", k=4) == [] and search.top("", k=4) == [] and search.top("river", k=0) == []


def test_equal_documents_keep_their_order():
    assert DocumentSearch(["same words", "other text", "same words"]).top("same words", k=3) == [0, 2]


def test_documents_without_words_are_accepted():
    assert DocumentSearch(["", "?!"]).top("heron", k=1) == []


async def test_it_is_a_tool_with_a_schema():
    tool = Tool.from_callable(DocumentSearch(TEXTS), name="search")
    assert tool.parameters["required"] == ["query"] and set(tool.parameters["properties"]) == {"query", "k"}
    assert tool.description.startswith("Search the documents")
    assert (await tool.call({"query": "heron reeds", "k": 1})).content == TEXTS[0]
    assert (await tool.call({"query": "zeppelin"})).content == "Nothing found. Try other words."
    assert (await tool.call({"q": "heron"})).is_error


@pytest.mark.parametrize("documents", [[], "one text"])
def test_documents_are_required(documents):
    with pytest.raises(ConfigError, match="a list of texts"):
        DocumentSearch(documents)


def test_jax_is_not_imported_by_a_search_and_can_be_imported_after_it(tmp_path):
    """bm25s calls JAX when it finds it, which then takes most of a GPU's memory from the trainer."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('jax imported')")
    (tmp_path / "jax/lax.py").write_text("def top_k(*args): print('jax called')")
    program = (
        "from ludic_envs.search import DocumentSearch; print(DocumentSearch(['a river', 'a bridge']).top('bridge', k=1)); "
        "import jax.lax; print(jax.lax.__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:3] == ["[1]", "jax imported", "jax.lax"]
