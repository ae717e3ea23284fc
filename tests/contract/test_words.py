"""Words that say nothing to a reader: actors without a name, archaic idioms. A symptom; the goal is plain English."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = re.compile(
    r"\b(whoever|whomever|somebody|nobody|everybody|anybody|for ever|anew|mended|for want of"
    r"|what (?:became|becomes) of|of (?:its|their|one's|her|his) own)\b",
    re.IGNORECASE,
)
"""Instead: name the component that acts; "its own X" before the noun, or leave it out; present tense."""
EXEMPT = {"research/log.md", "CHANGELOG.md", "tests/contract/test_words.py"}
"""The log and the change log are history."""


def texts_of(file: Path) -> list[tuple[int, str]]:
    """Line and text of each comment, docstring and string of a Python file; of other files each line."""
    text = file.read_text(encoding="utf-8")
    if not WORDS.search(text.replace("\n", " ").replace("_", " ")):  # to read its tokens takes a hundred times as long
        return []
    if file.suffix != ".py":
        return list(enumerate(text.splitlines(), start=1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    found = [(token.start[0], token.string) for token in tokens if token.type in kinds]
    return found + [
        (number, line.replace("_", " "))
        for number, line in enumerate(text.splitlines(), start=1)
        if re.match(r"\s*(?:async )?(?:def|class) ", line)
    ]


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "benchmarks", "scripts", "tests", "."])
def test_no_word_of_the_list_is_used(folder):
    files = ROOT.glob("*.md") if folder == "." else [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    used = [
        f"{file.relative_to(ROOT)}:{line}: {match[0]}"
        for file in sorted(files)
        if file.relative_to(ROOT).as_posix() not in EXEMPT and "data" not in file.parts
        for line, text in texts_of(file)
        for match in WORDS.finditer(text.replace("\n", " "))
    ]
    assert not used, f"{len(used)} in {folder}, first: " + "; ".join(used[:10])
