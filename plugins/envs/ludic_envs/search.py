"""BM25 search over documents in memory, with the package bm25s.

For the few hundred texts of one question or one agent. The env `musique_search` has one index per question; an agent can have its
own: `Tool.from_callable(DocumentSearch(texts), name="search")`.
"""

import importlib
import sys
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ludic.types.errors import ConfigError, MissingExtra


class DocumentSearch:
    """BM25 search; as a tool it returns the texts of the best documents."""

    def __init__(self, documents: Sequence[str]) -> None:
        try:
            _bm25s()  # checks that it is installed before the first search
        except ImportError as error:
            raise MissingExtra("search", "Search over documents") from error
        if isinstance(documents, str) or not documents:
            raise ConfigError(f"DocumentSearch needs a list of texts to search in, got {documents!r:.60}.")
        self.documents = list(documents)

    def __call__(self, query: str, k: int = 3) -> str:
        """Search the documents; the texts of the best matching ones come back, the best first.

        Args:
            query: What to look for, in a few words.
            k: How many documents.
        """
        found = self.top(query, k)
        return "\n\n".join(self.documents[n] for n in found) or "Nothing found. Try other words."

    def top(self, query: str, k: int) -> list[int]:
        """Indices of at most k documents that share a word with the query, best first."""
        (words,) = _words([query])
        if self._index is None or not words:
            return []
        scores = self._index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[: max(k, 0)]
        return [int(n) for n in best if scores[n] > 0]

    @cached_property
    def _index(self) -> Any | None:
        """Built at the first search, in a tool's thread; None if the documents hold no words."""
        words = _words(self.documents)
        if not any(words):
            return None
        index = _bm25s().BM25()
        index.index(words, show_progress=False)
        return index


_JAX = ("jax", "jax.lax")
_import_lock = threading.Lock()


def _bm25s() -> Any:
    """The package, imported without JAX. Where JAX is installed, bm25s calls it when it is imported, and JAX then takes three
    quarters of the GPU's memory; bm25s uses it only in `retrieve`. Meanwhile no other thread can import JAX."""
    with _import_lock:
        if (found := sys.modules.get("bm25s")) is not None:
            return found
        hidden = {name: sys.modules[name] for name in _JAX if name in sys.modules}
        for name in _JAX:
            sys.modules[name] = None  # type: ignore[assignment] # an import of it fails
        try:
            return importlib.import_module("bm25s")
        finally:
            for name in _JAX:
                del sys.modules[name]
            sys.modules.update(hidden)


def _words(texts: list[str]) -> list[list[str]]:
    """Lower-case words of each text, without English stop words and single letters."""
    words: list[list[str]] = _bm25s().tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    return words
