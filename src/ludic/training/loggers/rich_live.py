"""Stats as a live table in the terminal: one panel per prefix, and a sparkline of the reward.

Without a terminal (a pipe, a batch job) it writes plain lines instead.
"""

import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ludic.training.loggers.print import PrintLogger, chosen, format_number, shown_in_percent

BARS = "▁▂▃▄▅▆▇█"


class RichLiveLogger:
    """Shows the last value of every stat; numbers that come rarely, such as evaluations, stay."""

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        spark_key: str = "avg_total_reward",
        history: int = 100,
        spark_window: int = 50,
        *,
        precision: int = 4,
        percent: Collection[str] = (),
        total_steps: int | None = None,
        console: Console | None = None,
        status: Callable[[], str] | None = None,
    ) -> None:
        """`keys`: what is shown. `history` values of `spark_key` are kept and the last `spark_window` drawn. `total_steps`: to
        show the time that is left. `status`: returns a line under the table, at each `log`."""
        self._keys, self._precision, self._percent = keys, precision, percent
        self._spark_key = spark_key if "/" in spark_key else f"train/{spark_key}"
        self._spark_window = spark_window
        self._console = console or Console()
        self._history: deque[float] = deque(maxlen=history)
        self._latest: dict[str, float] = {}
        self._total_steps = total_steps
        self._began: tuple[int, float] | None = None
        """The first step that was logged, and when."""
        self._status = status
        self._activity = ""
        self._step: int | None = None
        self._drawing = threading.Lock()  # steps are logged from a thread, activity is shown from the event loop
        self._live: Live | None = None
        self._plain = PrintLogger(
            keys=keys, precision=precision, percent=percent, stream=self._console.file, status=status
        )

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if not self._console.is_terminal:
            self._plain.log(step, stats)
            return
        with self._drawing:
            self._forget_rates_of(stats)
            self._latest.update(stats)
            self._began = self._began or (step, time.monotonic())
            if self._spark_key in stats:
                self._history.append(stats[self._spark_key])
            self._step, self._activity = step, ""
            self._draw()

    def show_activity(self, text: str) -> None:
        """A line under the table; before the first step, a line alone."""
        if not self._console.is_terminal:
            self._plain.show_activity(text)
            return
        with self._drawing:
            if text != self._activity:
                self._activity = text
                self._draw()

    def _forget_rates_of(self, stats: Mapping[str, float]) -> None:
        """A result that no longer occurs has no rate; the table must not show its last one as if it were new."""
        groups = tuple(f"{name.partition('/')[0]}/" for name in stats if name.endswith("_rate"))
        self._latest = {
            name: value
            for name, value in self._latest.items()
            if not (name.endswith("_rate") and name.startswith(groups))
        }

    def _draw(self) -> None:
        activity = [Text(self._activity)] if self._activity else []
        table = [] if self._step is None else [self._picture(self._step)]
        self._started().update(Group(*table, *activity), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            if self._activity:
                self.show_activity("")
            self._live.stop()
            self._live = None
            atexit.unregister(self.close)

    def _started(self) -> Live:
        if self._live is None:
            # Drawn on `log` and `show_activity` only: no thread. A run that ends without `close` still gets its cursor back.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            atexit.register(self.close)
        return self._live

    def _picture(self, step: int) -> RenderableType:
        shown = chosen(self._latest, self._keys)
        groups: dict[str, list[str]] = {}
        for name in shown:
            prefix, slash, _ = name.partition("/")
            groups.setdefault(prefix if slash else "other", []).append(name)
        panels = [Panel(self._table(names), title=group, expand=False) for group, names in sorted(groups.items())]
        status = [] if self._status is None else [Text(self._status())]
        return Group(Text(self._headline(step), style="bold"), Columns(panels), *self._spark_line(), *status)

    def _headline(self, step: int) -> str:
        if self._total_steps is None:
            return f"step {step}"
        first, began = self._began or (step, 0.0)
        if step <= first:
            return f"step {step} of {self._total_steps}"
        seconds = round((time.monotonic() - began) / (step - first) * max(0, self._total_steps - step))
        return f"step {step} of {self._total_steps}, {timedelta(seconds=seconds)} left"

    def _table(self, names: Iterable[str]) -> Table:
        percent = shown_in_percent(self._percent, self._latest)
        table = Table.grid(padding=(0, 1))
        for name in names:
            number = format_number(self._latest[name], self._precision, name in percent)
            table.add_row(name.split("/", 1)[-1], Text(number, justify="right"))
        return table

    def _spark_line(self) -> list[RenderableType]:
        if not self._history:
            return []
        window = list(self._history)[-self._spark_window :]
        real = [value for value in window if math.isfinite(value)] or [math.nan]
        low, high = (format_number(value, self._precision) for value in (min(real), max(real)))
        return [Text(f"{self._spark_key} {sparkline(window)} {low} … {high}")]


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, scaled from the lowest to the highest; a gap for what is not finite."""
    real = [value for value in values if math.isfinite(value)]
    low, spread = (min(real), max(real) - min(real)) if real else (0.0, 0.0)
    top = len(BARS) - 1
    return "".join(
        (BARS[round((value - low) / spread * top)] if spread else BARS[top // 2]) if math.isfinite(value) else " "
        for value in values
    )
