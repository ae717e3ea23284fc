"""What first_run.py shows while it works: in a terminal a progress bar with the newest numbers, elsewhere a line now and then."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
LINES_PER_PHASE = 10
"""Without a terminal."""


class Display:
    """A TrainingLogger that also follows the phases which are not training."""

    def __init__(self, costs: Mapping[str, float]) -> None:
        """`costs`: the phases, and roughly which share of the time each takes; the time left is estimated from it."""
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            speed_estimate_period=60.0,
            disable=not self._console.is_terminal,
        )
        self._costs = dict(costs)
        self._bar = self._progress.add_task("", total=sum(self._costs.values()), numbers="")
        self._done_before, self._phase, self._total, self._num_done = 0.0, "", 1, 0
        self._shown: Sequence[str] = ()

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, phase: str, total: int, num_done: int = 0, shown: Sequence[str] = tuple(SHOWN)) -> None:
        """A phase of so many units; the phases before it are done. `shown`: which numbers of its steps mean something."""
        names = list(self._costs)
        self._done_before = sum(self._costs[name] for name in names[: names.index(phase)])
        self._phase, self._total, self._num_done, self._shown = phase, total, num_done, shown
        self.count(0)
        self._progress.update(self._bar, description=phase, numbers="")
        if self._progress.disable:
            self.say(f"{phase} ({total})")

    def count(self, amount: int) -> None:
        """So many more units of the phase are done."""
        self._num_done += amount
        share = min(1.0, self._num_done / max(1, self._total))
        self._progress.update(self._bar, completed=self._done_before + share * self._costs[self._phase])

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """The numbers of one step of the current phase."""
        found = {name: stats[SHOWN[name]] for name in self._shown if SHOWN[name] in stats}
        numbers = "   ".join(f"{name} {_number(name, value)}" for name, value in found.items())
        self.count(1)
        self._progress.update(self._bar, numbers=numbers)
        if self._progress.disable and step % max(1, self._total // LINES_PER_PHASE) == 0:
            self._console.print(f"  {step:4d}  {numbers}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)


def _number(name: str, value: float) -> str:
    if name == "tokens/s":
        return f"{value:,.0f}"
    return f"{value:.3f}" if name in ("reward", "nll") else f"{value:.1%}"
