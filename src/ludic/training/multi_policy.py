"""`train_policies`: the trainers of one run step by step together, each with its own optimizer, versions and checkpoints.

One round is one step of every trainer, in order; the first that asks has the episodes played (`SharedRollouts`). Then all policies
are evaluated together, if that is due, and saved. A request to stop takes effect before a round is trained on, never in the
middle of it: all trainers end, and are saved, at one step.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.evaluation import Evaluation, check_evaluation
from ludic.training.loggers import Resumable
from ludic.training.trainer import Trainer
from ludic.types import ConfigError, Evaluator, RequestsExhausted, TrainingLogger
from ludic.util.stop import StopRequested, StopSignal

logger = logging.getLogger(__name__)


async def train_policies(
    trainers: Mapping[str, Trainer],
    num_steps: int | None = None,
    *,
    train_logger: TrainingLogger | None = None,
    stop: StopSignal | None = None,
    evaluator: Evaluator | None = None,
    cfg: TrainerConfig | None = None,
) -> dict[str, float]:
    """`num_steps` more steps of each, or until the source has no more; returns the last round's metrics.

    Metrics are logged once a round, each under its policy's name: `first/train/loss`. `stop` ends the run when it is set, by the
    caller or by Ctrl-C. `evaluator` evaluates all policies at once (`ludic.eval.PolicyEvaluator`) when the settings of `cfg` that
    begin with eval_ say so; `first/eval/mean_reward` is logged.
    """
    return await PolicyTrainers(trainers, train_logger, evaluator, cfg).train(num_steps, stop)


class PolicyTrainers:
    """The trainers of a run as one object, with what a run needs of a single `Trainer`: step, stop, train and eval."""

    def __init__(
        self,
        trainers: Mapping[str, Trainer],
        train_logger: TrainingLogger | None = None,
        evaluator: Evaluator | None = None,
        cfg: TrainerConfig | None = None,
    ) -> None:
        """The arguments are those of `train_policies`."""
        _check(trainers)
        cfg = cfg or TrainerConfig()
        shares = any(trainer.learner.shares_weights for trainer in trainers.values())
        check_evaluation(cfg, evaluator, is_first=True, shares_weights=shares)
        self.trainers = trainers
        self.stop = StopSignal()
        self._logger = train_logger
        self._evaluates_first = cfg.eval_at_start
        self._evaluation = Evaluation(evaluator, cfg, self._note_evaluation)

    @property
    def step(self) -> int:
        """Updates of each that are done."""
        return next(iter(self.trainers.values())).step

    async def train(self, num_steps: int | None = None, stop: StopSignal | None = None) -> dict[str, float]:
        """See `train_policies`. Without `stop` there is a new one, `self.stop`."""
        self.stop = stop = stop if stop is not None else StopSignal()
        first = next(iter(self.trainers.values()))
        end = None if num_steps is None else first.step + num_steps
        if first.step and isinstance(self._logger, Resumable):
            self._logger.resume(first.step)
            self._evaluation.find_missing(first.step, self._logger)
        stats: dict[str, float] = {}
        try:
            with stop.catch_signals():
                first.stop = stop  # only the first waits for episodes; the others finish the round
                if (self._evaluates_first and not first.step) or self._evaluation.is_missing:
                    await self._evaluation.run(first.step, stop)
                while (end is None or first.step < end) and not stop.is_set:
                    try:
                        stats = await self._round()
                    except (RequestsExhausted, StopRequested) as reason:
                        logger.info("training ends at step %d: %s", first.step, reason or type(reason).__name__)
                        _warn_if_steps_differ(self.trainers)
                        break
                await self._save_all()
                await self._evaluation.finish()
        finally:
            await self._evaluation.cancel()
        return stats

    async def eval(self) -> dict[str, float]:
        """Evaluate all policies as they are; the metrics by policy, which are also logged."""
        await self._evaluation.run_now(self.step)
        return _by_policy(self._evaluation.last)

    async def _round(self) -> dict[str, float]:
        """One step of every trainer. Metrics are logged before anything is saved: a process that is killed loses no line."""
        found = {name: await trainer.train_step(save=False) for name, trainer in self.trainers.items()}
        stats = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
        self._log(self.step, stats)
        self._evaluation.check()
        if self._evaluation.is_due(self.step, self.step - 1):
            await self._evaluation.run(self.step, self.stop)
        for name, trainer in self.trainers.items():
            saves = trainer.checkpointer
            if saves is not None and saves.should_save(self.step):
                await self._evaluation.wait_for_metric(self.step, saves.config.best_metric)
                await trainer.save_if_due(found[name])
        return stats

    async def _save_all(self) -> None:
        """Save what has not been saved. The error of an evaluation that a checkpoint waits for is raised after all are saved."""
        failed: Exception | None = None
        for trainer in self.trainers.values():
            if trainer.checkpointer is not None:
                try:
                    await self._evaluation.wait_for_metric(trainer.step, trainer.checkpointer.config.best_metric)
                except Exception as error:  # noqa: BLE001 - raised below
                    failed = error
            await trainer.train(0)
        if failed is not None:
            raise failed

    def _note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log an evaluation, and give each trainer its part of it, which may make its checkpoint the best."""
        named = _by_policy(metrics)
        for name, trainer in self.trainers.items():
            start = f"{name}/"
            trainer.note_evaluation({key.removeprefix(start): named[key] for key in named if key.startswith(start)})
        self._log(step, named)

    def _log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._logger is not None:
            self._logger.log(step, stats)


def _by_policy(metrics: Mapping[str, float]) -> dict[str, float]:
    """`eval/ann/mean_reward` as `ann/eval/mean_reward`, and the step of the evaluation for each policy."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        policy, has_policy, name = key.removeprefix("eval/").partition("/")
        if has_policy:
            found |= {f"{policy}/eval/{name}": value, f"{policy}/eval/step": metrics["eval/step"]}
    return found


def _warn_if_steps_differ(trainers: Mapping[str, Trainer]) -> None:
    steps = {name: trainer.step for name, trainer in trainers.items()}
    if len(set(steps.values())) > 1:
        logger.warning(
            "the trainers ended at different steps, %s: requests ran out when one of them had nothing to train on and fetched "
            "again. Their newest checkpoints are of different steps too; common_step finds one that all have.",
            steps,
        )


def common_step(places: Iterable[CheckpointConfig | str | Path]) -> int | None:
    """The newest step that every trainer has a complete checkpoint of: where to resume all of them. None if there is none.

    A run that was killed while it saved has the newest checkpoint of some trainers only.
    """
    configs = [place if isinstance(place, CheckpointConfig) else CheckpointConfig(place) for place in places]
    found = [set(CheckpointManager(config).steps()) for config in configs]
    return max(set.intersection(*found), default=None) if found else None


def _check(trainers: Mapping[str, Trainer]) -> None:
    if not trainers:
        raise ConfigError("train_policies needs at least one trainer: {policy name: trainer}.")
    steps = {name: trainer.step for name, trainer in trainers.items()}
    if len(set(steps.values())) > 1:
        raise ConfigError(
            f"The trainers are at different steps: {steps}. Resume all from one that they all have: resume_from=common_step(…)."
        )
    for name, trainer in trainers.items():
        if not trainer.learner.is_alone:
            raise ConfigError(f"The trainer of {name!r} has several ranks, which train_policies cannot keep in step.")
        if trainer.cfg.steps_per_batch > 1:
            raise ConfigError(
                f"The trainer of {name!r} takes {trainer.cfg.steps_per_batch} optimizer steps per batch, but train_policies keeps "
                "its trainers in step by one each. Leave updates_per_batch and mini_batches at 1."
            )
        if trainer.cfg.eval_at_start or trainer.cfg.eval_every_n_steps:
            raise ConfigError(
                f"The trainer of {name!r} is set to evaluate, but policies that play together are evaluated together: give "
                "train_policies an evaluator and cfg=TrainerConfig(eval_every_n_steps=…)."
            )
