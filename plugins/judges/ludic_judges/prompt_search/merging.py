"""Merging two candidates of a prompt search: the changes that each made to their common ancestor, in one.

GEPA's merge works on systems of several texts, and takes each text whole. For a search over one text, sentences are what texts are
there. Nothing here calls a model.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Texts: TypeAlias = Mapping[str, str]
"""Argument of the protocol factory → text."""


def merged_texts(ancestor: Texts, better: Texts, other: Texts) -> tuple[dict[str, str], bool]:
    """The changes that two descendants made to their ancestor, in one candidate; and whether both changed the same passage.

    Of several texts each is taken from the descendant that changed it; one that both changed is the better one's (GEPA's
    system-aware merge). A single text is treated in the same way sentence by sentence; what both added is kept.
    """
    if len(ancestor) == 1:
        ((name, text),) = ancestor.items()
        found, has_conflict = merged_sentences(text, better[name], other[name])
        return {name: found}, has_conflict
    made = {name: other[name] if better[name] == text else better[name] for name, text in ancestor.items()}
    return made, any(text not in (better[name], other[name]) for name, text in ancestor.items())


def merged_sentences(ancestor: str, better: str, other: str) -> tuple[str, bool]:
    """A three-way merge of sentences and lines. Where both changed the same ones, the better's count.

    >>> merged_sentences("Answer. Be kind.", "Answer. Be kind. Use digits.", "Answer briefly. Be kind.")
    ('Answer briefly. Be kind. Use digits.', False)
    """
    base = _sentences(ancestor)
    first, second = _edits(base, _sentences(better)), _edits(base, _sentences(other))
    taken = [range(start, end) for start, end, _ in first]
    lost = [edit for edit in second if any(set(range(*edit[:2])) & set(span) for span in taken) and edit not in first]
    edits = first + [edit for edit in second if edit not in lost and edit not in first]
    pieces: list[str] = []
    for place in range(len(base) + 1):
        for start, _, new in edits:
            if start == place:
                pieces += [piece for piece in new if piece.strip() not in {known.strip() for known in pieces}]
        if place < len(base) and not any(start <= place < end for start, end, _ in edits):
            pieces.append(base[place])
    found = {piece.strip() for piece in pieces}
    common = {piece.strip() for piece in _sentences(better)} & {piece.strip() for piece in _sentences(other)}
    if not common <= found:  # one of them has moved a sentence that the other's change covers
        return better.strip(), True
    joined = ""
    for piece in pieces:
        joined += piece if not joined or joined[-1].isspace() or piece[0].isspace() else f" {piece}"
    return joined.strip(), bool(lost)


def _sentences(text: str) -> list[str]:
    """The pieces of a text, each with the white space before it; together they are the text."""
    return [piece for piece in re.split(r"(?<=[.!?])(?=\s)|(?<=\n)(?=\S)", text) if piece]


def _edits(base: Sequence[str], changed: Sequence[str]) -> list[tuple[int, int, list[str]]]:
    """(first place, place after the last, what is there instead) of every passage that was changed."""
    before, after = [piece.strip() for piece in base], [piece.strip() for piece in changed]
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(start, end, list(changed[low:high])) for kind, start, end, low, high in codes if kind != "equal"]
