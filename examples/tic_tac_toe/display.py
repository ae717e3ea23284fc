"""The display of first_run.py while it works: a line now and then, and in a terminal the newest numbers below."""

from collections.abc import Mapping, Sequence

from rich.console import Console

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


class Display:
    """A TrainingLogger that also follows the phases which are not training."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._status = self._console.status("")
        self._phase, self._total, self._num_done, self._shown = "", 1, 0, tuple[str, ...]()

    def __enter__(self) -> "Display":
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begin(self, phase: str, total: int, num_done: int = 0, shown: Sequence[str] = tuple(SHOWN)) -> None:
        """A phase of so many units. `shown`: which numbers of its steps mean something."""
        self._phase, self._total, self._num_done, self._shown = phase, total, num_done, tuple(shown)
        self.say(f"{phase} ({total})")

    def count(self, amount: int, numbers: str = "") -> None:
        """So many more units of the phase are done."""
        self._num_done += amount
        self._status.update(f"{self._phase}: {self._num_done} of {self._total}  {numbers}")

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """The numbers of one step of the current phase."""
        found = {name: stats[SHOWN[name]] for name in self._shown if SHOWN[name] in stats}
        numbers = "   ".join(f"{name} {_number(name, value)}" for name, value in found.items())
        self.count(1, numbers)
        if step % max(1, self._total // LINES_PER_PHASE) == 0:
            self._console.print(f"  {step:4d}  {numbers}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)


def _number(name: str, value: float) -> str:
    if name == "tokens/s":
        return f"{value:,.0f}"
    return f"{value:.3f}" if name in ("reward", "nll") else f"{value:.1%}"
