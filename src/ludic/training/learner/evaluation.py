"""When a trainer's weights are evaluated, by whom, and what was last found."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ludic.training.config import TrainerConfig
from ludic.training.learner.stop import StopRequested, StopSignal
from ludic.types import ConfigError, Evaluator, TakesSnapshots

# ----------------------------------------------------------------------------------------------------
# An evaluation beside training: at most one at a time, and its errors are not lost.
# ----------------------------------------------------------------------------------------------------


class BackgroundEval:
    """Holds the one evaluation that runs beside the steps of a trainer."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._step = 0

    def start(self, step: int, evaluation: Coroutine[Any, Any, Any]) -> None:
        assert self._task is None, "the evaluation before has to be finished first"
        self._step, self._task = step, asyncio.create_task(evaluation)

    def is_evaluating(self, step: int) -> bool:
        return self._task is not None and self._step == step

    def check(self) -> None:
        """Raise what the evaluation raised, if it has ended so."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def finish(self) -> None:
        """Wait for it; what it raised is raised here."""
        if self._task is not None:
            task, self._task = self._task, None
            try:
                await task
            finally:
                await _ended(task)  # also when it is us who were cancelled

    async def abandon(self) -> None:
        """Training has failed: nobody waits for the evaluation any more."""
        if self._task is not None:
            task, self._task = self._task, None
            await _ended(task)


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at: asyncio need not complain that nobody did


Log = Callable[[int, Mapping[str, float]], None]


class Evaluation:
    """One evaluator, asked now or beside the steps that follow."""

    def __init__(self, evaluator: Evaluator | None, cfg: TrainerConfig, log: Log) -> None:
        self.evaluator = evaluator
        self._cfg, self._log = cfg, log
        self.background = BackgroundEval()
        """The evaluation that runs while training goes on."""
        self.last: dict[str, float] = {}
        """The newest metrics, with the step of the weights they speak of under eval/step."""

    def is_due(self, step: int) -> bool:
        every = self._cfg.eval_every_n_steps
        return every is not None and every > 0 and step % every == 0

    async def now(self, step: int) -> dict[str, float]:
        """The metrics of the weights as they are, logged under eval/."""
        self._take_snapshot(step)
        return await self._of(step)

    async def run(self, step: int, stop: StopSignal) -> None:
        if not self._cfg.eval_in_background:
            with contextlib.suppress(StopRequested):  # it can take long, and nothing is lost with it
                await stop.unless(self.now(step))
            return
        await self.background.finish()
        if not stop.is_set:
            self._take_snapshot(step)
            self.background.start(step, self._of(step))

    def found_of(self, step: int) -> dict[str, float]:
        """What was found of this step's weights; an older evaluation says nothing of them."""
        return self.last if self.last.get("eval/step") == step else {}

    async def wait_for_judgement(self, step: int, best_metric: str | None) -> None:
        """Which checkpoint is the best may hang on the evaluation of these weights, which may still be running."""
        if best_metric is not None and best_metric.startswith("eval/") and self.background.is_evaluating(step):
            await self.background.finish()

    async def _of(self, step: int) -> dict[str, float]:
        """`step` is the version that the evaluator sees; beside training, the trainer's goes on meanwhile."""
        if self.evaluator is None:
            raise ConfigError("There is no evaluator; give Trainer(evaluator=…).")
        _, metrics = await self.evaluator.eval(
            max_steps=self._cfg.eval_max_steps,
            timeout_s=self._cfg.eval_timeout_s,
            concurrency=self._cfg.eval_concurrency,
        )
        named = {f"eval/{name.removeprefix('eval/')}": value for name, value in metrics.items()}
        named["eval/step"] = float(step)
        self.last = named
        self._log(step, named)
        return named

    def _take_snapshot(self, step: int) -> None:
        if isinstance(self.evaluator, TakesSnapshots):
            self.evaluator.take_snapshot(step)
