"""The one place that decides whether the `ludic` command writes colours; every console of the command is made here.

Standard library only: `ludic` and `ludic --help` load it. `make_console` loads rich.
"""

import os
import sys
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

Style = Literal["bold", "dim", "good", "bad", "doubtful", "command"]
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "good": "32", "bad": "31", "doubtful": "33", "command": "36"}


def is_coloured(stream: IO[str] | None = None) -> bool:
    """Whether escape codes go to the stream (default: stdout): not with $NO_COLOR, always with $FORCE_COLOR, else on a terminal
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


def make_console(*, soft_wrap: bool = True) -> "Console":
    """A rich console on stdout that keeps to `is_coloured`."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=soft_wrap, color_system="auto" if is_coloured() else None)
