"""Text on a terminal: in colours or without, and never a control character of another author.

Standard library only: `ludic` and `ludic --help` load it. `make_console`, which makes every console of the command, loads rich.
"""

import logging
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

Style = Literal["bold", "dim", "good", "bad", "doubtful", "command"]
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "good": "32", "bad": "31", "doubtful": "33", "command": "36"}


def is_coloured(stream: IO[str] | None = None) -> bool:
    """True if escape codes go to the stream (default: stdout): not with $NO_COLOR, always with $FORCE_COLOR, else on a terminal
    that is not dumb."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


def paint(text: str, style: Style) -> str:
    """The text in a style of the command, if stdout is coloured."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text and is_coloured() else text


def harmless(text: str) -> str:
    """The text with � for characters that could move the cursor, change colours, set titles or turn the reading order around."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "\ufffd" for c in text)


class _HarmlessFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def make_log_harmless() -> None:
    """Warnings of the library, which quote files and replies, reach stderr as `harmless` text."""
    if logging.lastResort is not None:  # the handler where a program has set up none
        logging.lastResort.setFormatter(_HarmlessFormatter())


def make_console(*, soft_wrap: bool = True) -> "Console":
    """A rich console on stdout that keeps to `is_coloured`; whatever it prints is `harmless`."""
    from rich.console import Console

    class HarmlessConsole(Console):
        def render(self, *given: Any) -> "Iterator[Segment]":
            for segment in super().render(*given):
                yield segment if segment.control else segment._replace(text=harmless(segment.text))

    return HarmlessConsole(highlight=False, soft_wrap=soft_wrap, color_system="auto" if is_coloured() else None)
