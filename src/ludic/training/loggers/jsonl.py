"""The record of a run: metrics.jsonl, which `ludic.util.metrics_file` reads.

Each line is one write to the file, so killing the process leaves at most the last line incomplete.
"""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ludic.types import ConfigError
from ludic.util.files import NotWritten
from ludic.util.metrics_file import newest_step_of, whole_lines

logger = logging.getLogger(__name__)


class JSONLLogger:
    """Appends JSON lines to a file that may be read meanwhile."""

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        """`resume_step`: lines of later steps are removed, as by `resume`."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._drop_unfinished_line()
        except OSError as error:
            raise ConfigError(f"Cannot write metrics to {self.path}: {error.strerror}.") from error
        if resume_step is not None:
            self.resume(resume_step)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        taken = {"step", "time"} & stats.keys()
        if taken:
            raise ConfigError(f"A stat called {sorted(taken)} would hide the line's own. Give it a prefix: train/step.")
        numbers = {name: float(value) for name, value in stats.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        line = json.dumps({"step": step, "time": time.time(), **finite}, separators=(",", ":")).encode() + b"\n"
        start = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                self._file.truncate(start)  # half a line would spoil the next one too
                raise OSError("only part of a line fitted")
        except OSError as error:
            raise NotWritten.of(self.path, error) from error

    def resume(self, step: int) -> None:
        """Remove the lines of steps after `step`, which the resumed run writes again, and damaged lines."""
        kept = [line for line, row in whole_lines(self.path) if row["step"] <= step]
        shorter = self.path.with_name(f".{self.path.name}.resumed")
        with shorter.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        shorter.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def newest_step_of(self, name: str) -> int | None:
        return newest_step_of(self.path, name)

    def close(self) -> None:
        self._file.close()

    def _drop_unfinished_line(self) -> None:
        """A power cut can leave one, or a kill between two pages of a long line."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s ends in the middle of a line; %d bytes are cut off.", self.path, len(content) - whole)
            self._file.truncate(whole)
