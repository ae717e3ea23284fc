"""What a person sees while first_run.py works: how far it is, how long it still takes, how the games go.

In a terminal a live picture; elsewhere (a pipe, CI) a line now and then.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ludic.training.loggers.rich_live import sparkline

SHOWN = {
    "reward": "train/avg_total_reward",
    "win": "train/win_rate",
    "draw": "train/draw_rate",
    "loss": "train/loss_rate",
    "illegal": "train/illegal_rate",
    "unreadable": "train/parse_error_rate",
    "nll": "train/nll_mean",
    "tokens/s": "perf/tokens_per_s",
}
PERCENT = ("win", "draw", "loss", "illegal", "unreadable")
LINES_PER_PHASE = 10
"""Without a terminal."""


class Display:
    """A TrainingLogger that also follows the phases which are not training."""

    def __init__(self, costs: Mapping[str, float], console: Console | None = None) -> None:
        """`costs`: the phases, and roughly which share of the time each takes; the time left is reckoned from it."""
        self._console = console or Console(highlight=False)
        self._costs = dict(costs)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=60.0,
        )
        self._task = self._bar.add_task("", total=sum(self._costs.values()))
        self._live = Live(console=self._console, auto_refresh=True, refresh_per_second=2)
        self._done_before = 0.0
        self._phase, self._total, self._num_done = "", 1, 0
        self._shown: Sequence[str] = ()
        self._rewards: deque[float] = deque(maxlen=60)
        self._latest: dict[str, float] = {}

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def begin(self, phase: str, total: int, num_done: int = 0, shown: Sequence[str] = tuple(SHOWN)) -> None:
        """A phase of so many units; what came before it is done. `shown`: which numbers of its steps mean something."""
        names = list(self._costs)
        self._done_before = sum(self._costs[name] for name in names[: names.index(phase)])
        self._phase, self._total, self._num_done = phase, total, num_done
        self._shown, self._latest = shown, {}
        self._bar.update(self._task, description=phase)
        self._draw()
        if not self._console.is_terminal:
            self._console.print(f"{phase} ({total})")

    def advance(self, amount: int = 1) -> None:
        self._num_done += amount
        self._draw()

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """The numbers of one step of the current phase."""
        self._latest.update({name: stats[SHOWN[name]] for name in self._shown if SHOWN[name] in stats})
        if "reward" in self._latest:
            self._rewards.append(self._latest["reward"])
        self.advance()
        if not self._console.is_terminal and step % max(1, self._total // LINES_PER_PHASE) == 0:
            self._console.print(f"  {step:4d}  {self._numbers()}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def _draw(self) -> None:
        share = min(1.0, self._num_done / max(1, self._total))
        self._bar.update(self._task, completed=self._done_before + share * self._costs[self._phase])
        if self._console.is_terminal:
            self._live.update(Group(self._bar, self._picture()))

    def _picture(self) -> Table | Text:
        if not self._latest:
            return Text("")
        lines = Table.grid(padding=(0, 2))
        lines.add_row(Text(f"{self._num_done} of {self._total}", style="dim"), Text(self._numbers()))
        if self._rewards:
            drawn = f"{sparkline(list(self._rewards))}  {self._rewards[0]:.2f} → {self._rewards[-1]:.2f}"
            lines.add_row(Text("reward", style="dim"), Text(drawn, style="green"))
        return lines

    def _numbers(self) -> str:
        return "   ".join(f"{name} {_number(name, value)}" for name, value in self._latest.items())


def _number(name: str, value: float) -> str:
    if name in PERCENT:
        return f"{value:.1%}"
    return f"{value:,.0f}" if name == "tokens/s" else f"{value:.3f}"
