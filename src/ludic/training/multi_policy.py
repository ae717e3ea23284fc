"""`train_policies`: the trainers of one run step by step together, each with its own optimizer, versions and checkpoints.

One round is one step of every trainer, in order; the first that asks has the episodes played (`SharedRollouts`). A request
to stop takes effect before a round is trained on, never in the middle of it: all trainers end, and are saved, at one step.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.learner.stop import StopRequested, StopSignal
from ludic.training.loggers import Resumable
from ludic.training.trainer import Trainer
from ludic.types import ConfigError, RequestsExhausted, TrainingLogger

logger = logging.getLogger(__name__)


async def train_policies(
    trainers: Mapping[str, Trainer],
    num_steps: int | None = None,
    *,
    train_logger: TrainingLogger | None = None,
    stop: StopSignal | None = None,
) -> dict[str, float]:
    """`num_steps` more steps of each, or until the source has no more; returns the last round's metrics.

    Metrics are logged once a round, each under its policy's name: `first/train/loss`. `stop` ends the run when it is set, by the
    caller or by Ctrl-C.
    """
    _check(trainers)
    stop = stop if stop is not None else StopSignal()
    first = next(iter(trainers.values()))
    end = None if num_steps is None else first.step + num_steps
    if first.step and isinstance(train_logger, Resumable):
        train_logger.resume(first.step)
    stats: dict[str, float] = {}
    with stop.catch_signals():
        first.stop = stop  # only the first waits for episodes; the others finish the round
        while (end is None or first.step < end) and not stop.is_set:
            try:
                stats = await _round(trainers)
            except (RequestsExhausted, StopRequested) as reason:
                logger.info("training ends at step %d: %s", first.step, reason or type(reason).__name__)
                _warn_if_steps_differ(trainers)
                break
            if train_logger is not None:
                train_logger.log(first.step, stats)
        for trainer in trainers.values():
            await trainer.train(0)  # saves what has not been saved
    return stats


class PolicyTrainers:
    """The trainers of a run as one object, with what a run needs of a single `Trainer`: step, stop and train."""

    def __init__(self, trainers: Mapping[str, Trainer], train_logger: TrainingLogger | None = None) -> None:
        _check(trainers)
        self.trainers = trainers
        self.stop = StopSignal()
        self._logger = train_logger

    @property
    def step(self) -> int:
        """Updates of each that are done."""
        return next(iter(self.trainers.values())).step

    async def train(self, num_steps: int | None = None) -> dict[str, float]:
        """`train_policies`, with a new `stop`."""
        self.stop = StopSignal()
        return await train_policies(self.trainers, num_steps, train_logger=self._logger, stop=self.stop)


async def _round(trainers: Mapping[str, Trainer]) -> dict[str, float]:
    stats: dict[str, float] = {}
    for name, trainer in trainers.items():
        stats |= {f"{name}/{key}": value for key, value in (await trainer.train_step()).items()}
    return stats


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
                f"The trainer of {name!r} is set to evaluate, which train_policies does not do: call trainer.eval() between two "
                "calls of it, or rate the members of a league (ludic.eval.ratings)."
            )
