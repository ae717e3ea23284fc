"""Interfaces that a logger may offer besides `log`, several loggers as one (`TeeLogger`), and the record of a run.

`JSONLLogger` writes metrics.jsonl, which `ludic.util.metrics_file` reads. Each line is one write to the file, so killing the
process leaves at most the last line incomplete.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from ludic.types import ConfigError, LudicError, TrainingLogger
from ludic.util.files import NotWritten
from ludic.util.metrics_file import newest_step_of, whole_lines

logger = logging.getLogger(__name__)


@runtime_checkable
class Closable(Protocol):
    """Has something to finish when the run ends."""

    def close(self) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """Keeps a record, and can remove the steps that a resumed run logs again."""

    def resume(self, step: int) -> None:
        """Remove what came after `step`; called once, before the first `log`."""
        ...


@runtime_checkable
class KeepsRecord(Protocol):
    """Can say what was logged, also by an earlier process."""

    def newest_step_of(self, name: str) -> int | None:
        """The newest step with this number, alone or under a policy's name; -1 if none has it, None if there is no record."""
        ...


@runtime_checkable
class ShowsActivity(Protocol):
    """Can show what happens between two calls of `log`, such as a batch that is being generated."""

    def show_activity(self, text: str) -> None:
        """Called every second or so; the text is empty when there is nothing to show."""
        ...


class TeeLogger:
    """Passes everything on to each child. A child that fails is reported once, and called again the next time."""

    def __init__(self, *loggers: TrainingLogger) -> None:
        self._children = loggers
        self._reported: set[int] = set()

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        for index, child in enumerate(self._children):
            # Each child gets a copy: one that changes it must not change what the others see.
            self._survive(index, "log", partial(child.log, step, dict(stats)))

    def show_activity(self, text: str) -> None:
        for index, child in enumerate(self._children):
            if isinstance(child, ShowsActivity):
                self._survive(index, "show_activity", partial(child.show_activity, text))

    def resume(self, step: int) -> None:
        """Not guarded: a record that cannot be resumed would hold every step twice."""
        for child in self._children:
            if isinstance(child, Resumable):
                child.resume(step)

    def newest_step_of(self, name: str) -> int | None:
        found = [child.newest_step_of(name) for child in self._children if isinstance(child, KeepsRecord)]
        return max((step for step in found if step is not None), default=None)

    def close(self) -> None:
        for index, child in enumerate(self._children):
            if isinstance(child, Closable):
                self._survive(index, "close", child.close)

    def _survive(self, index: int, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if index not in self._reported:
                self._reported.add(index)
                name, is_ours = type(self._children[index]).__name__, isinstance(error, LudicError)
                why = f": {error}" if is_ours else "."
                goes_on = "Training continues, later failures are not reported."
                logger.error("%s failed in %s%s %s", name, what, why, goes_on, exc_info=not is_ours)


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
