"""Search over documents at hand: BM25, by the package bm25s.

Meant for the few hundred texts that belong to one question or one agent, all in memory. The env `musique_search` has one for
each question; an agent can have one of its own: `Tool.from_callable(DocumentSearch(texts), name="search")`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ludic.types.errors import ConfigError, MissingExtra


class DocumentSearch:
    """Finds the documents that share the rarest words with a query; as a tool it gives back their texts."""

    def __init__(self, documents: Sequence[str]) -> None:
        try:
            import bm25s  # noqa: F401 - its absence is found now, and not when a model first searches
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
        """Positions of at most k documents, the best first. Those without a word of the query are never among them."""
        (words,) = _words([query])
        if self._index is None or not words:
            return []
        scores = self._index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[: max(k, 0)]
        return [int(n) for n in best if scores[n] > 0]

    @cached_property
    def _index(self) -> Any | None:
        """Made at the first search, which runs in a tool's thread; None when the documents hold no words."""
        import bm25s

        words = _words(self.documents)
        if not any(words):
            return None
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        return index


def _words(texts: list[str]) -> list[list[str]]:
    """Those of each text in lower case, without the commonest English ones and without single letters."""
    import bm25s

    words: list[list[str]] = bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    return words
