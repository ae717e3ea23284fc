"""The output of several roles on one console: each line behind the name of who wrote it."""

import os
import sys
from collections.abc import Sequence
from typing import IO

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_BOLD = 1


class MergedOutput:
    """`actor-0 | …`; in colour where it is read by a person."""

    def __init__(self, names: Sequence[str], stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._width = max(map(len, names), default=0)
        self._codes = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._is_coloured = self._stream.isatty() and not os.environ.get("NO_COLOR")

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if self._is_coloured:
            prefix = f"\x1b[{self._codes.get(name, _BOLD)}m{prefix}\x1b[0m"
        self._stream.write(f"{prefix} {line}\n")
        self._stream.flush()
