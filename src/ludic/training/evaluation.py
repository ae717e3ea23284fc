"""Evaluations of a trainer's weights: between two steps, or in the background while the next steps run."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ludic.tasks import cancel_all
from ludic.training.config import TrainerConfig
from ludic.training.loggers import KeepsRecord
from ludic.types import ConfigError, Evaluator, TakesSnapshots, TrainingLogger
from ludic.util.stop import StopRequested, StopSignal

logger = logging.getLogger(__name__)


def check_evaluation(cfg: TrainerConfig, evaluator: Evaluator | None, *, is_first: bool, shares_weights: bool) -> None:
    """ConfigError if the settings ask for evaluations that this process cannot make."""
    if (cfg.eval_at_start or cfg.eval_every_n_steps) and evaluator is None and is_first:
        raise ConfigError("eval_at_start or eval_every_n_steps is set, but there is no evaluator.")
    if cfg.eval_in_background and shares_weights and not isinstance(evaluator, TakesSnapshots):
        raise ConfigError(
            "eval_in_background=True, but the engine serves the very weights that are trained: they would change in the middle "
            "of an evaluation. Evaluate on a copy: SnapshotEvaluator(evaluator, EngineSnapshot(engine)), whose agents talk to "
            "the snapshot."
        )


class Evaluation:
    """One evaluator, its newest result, and at most one evaluation in the background."""

    def __init__(
        self, evaluator: Evaluator | None, cfg: TrainerConfig, log: Callable[[int, Mapping[str, float]], None]
    ) -> None:
        self.evaluator = evaluator
        self._cfg, self._log = cfg, log
        self.last: dict[str, float] = {}
        """The newest metrics, with the step of the evaluated weights under eval/step."""
        self._task: asyncio.Task[Any] | None = None
        """The evaluation that runs while training continues, or whose result was not yet looked at."""
        self._task_step = 0
        self.is_missing = False
        """True if an evaluation was due before this process began, and has no result: the next one makes up for it."""

    def find_missing(self, step: int, record: TrainingLogger | None) -> None:
        """Called when a run goes on after `step`. A stop or a kill may have ended an evaluation: the record has no result of it."""
        newest = record.newest_step_of("eval/step") if isinstance(record, KeepsRecord) else None
        self.is_missing = self._cfg.lacks_evaluation(step, newest)
        if self.is_missing:
            logger.info("the last evaluation up to step %d has no result: the resumed weights are evaluated", step)

    def is_due(self, step: int, since: int) -> bool:
        """True if one of the updates after `since` is to be evaluated."""
        every = self._cfg.eval_every_n_steps
        return self.is_missing or (every is not None and every > 0 and step // every > since // every)

    async def run(self, step: int, stop: StopSignal) -> None:
        """Evaluate the weights of this step; in the background, if the settings say so."""
        self.is_missing = False
        if not self._cfg.eval_in_background:
            with contextlib.suppress(StopRequested):  # it can take long, and nothing is lost with it
                await stop.unless(self.run_now(step))
            return
        await self.finish()
        if not stop.is_set:
            self._take_snapshot(step)
            self._task_step, self._task = step, asyncio.create_task(self._evaluate(step))

    async def run_now(self, step: int) -> dict[str, float]:
        """The metrics of the weights as they are, logged under eval/."""
        self._take_snapshot(step)
        return await self._evaluate(step)

    def metrics_of(self, step: int) -> dict[str, float]:
        """The metrics of this step's weights; empty if the newest evaluation is of older ones."""
        return self.last if self.last.get("eval/step") == step else {}

    async def wait_for_metric(self, step: int, name: str | None) -> None:
        """If a background evaluation of this step is about to give the metric of this name, wait for it."""
        if name is not None and name.startswith("eval/") and self._task_step == step:
            await self.finish()

    def check(self) -> None:
        """Raise the error of a background evaluation that has failed."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def finish(self) -> None:
        """Wait for the background evaluation, and raise its error."""
        task, self._task = self._task, None
        if task is not None:
            try:
                await task
            finally:
                await cancel_all([task])  # also if the waiting coroutine was cancelled

    async def cancel(self) -> None:
        """Called when training has failed: end the background evaluation and drop its result."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_all([task])

    async def _evaluate(self, step: int) -> dict[str, float]:
        """`step` is the version that the evaluator sees; in the background the trainer's own is ahead of it."""
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
