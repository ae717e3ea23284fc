"""Ranks that end: `torchrun … -m tests.integration.fsdp_endings FOLDER ENDING…`; each rank writes FOLDER/ENDING-RANK.json."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ludic.distributed.ranks import Ranks, join_ranks, leave_ranks
from ludic.training import CheckpointConfig, Trainer
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import SAWBatch
from tests.integration.fsdp_scenarios import Given, Recorder, Run, batches, llama, trainer_of


class Interrupted(Given):
    """At its third batch something happens."""

    def __init__(self, what: str) -> None:
        super().__init__(batches(6))
        self._what = what

    async def next_batch(self) -> SAWBatch:
        if self.position == 2:
            if self._what == "error":
                raise ValueError("the file of the third batch is gone")
            if self._what == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
        return await super().next_batch()


class Breaking(TokenClippedSurrogateLoss):
    """Fails in the middle of an update."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self._calls, self._breaks = 0, breaks

    def __call__(self, tokens: Any) -> Any:
        self._calls += 1
        if self._breaks and self._calls > 2:
            raise ArithmeticError("this rank has a bug")
        return super().__call__(tokens)


class BrokenPublisher(Recorder):
    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        super().publish(dict(list(state_dict.items())[:2]), version)
        raise ConnectionError("the server is down")


class SlowEvaluator:
    async def eval(self, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        time.sleep(0.5)  # long enough that the others are waiting
        return [], {"score": 0.75}


def made(ending: str, ranks: Ranks, folder: Path) -> Trainer:
    mine = ranks.rank == 1
    run = Run(steps=3)
    match ending:
        case "exhausted":
            return trainer_of(run, ranks)
        case "one_exhausted":
            return trainer_of(run, ranks, batch_source=Given(batches(2 if mine else 6)))
        case "error" | "signal":
            return trainer_of(run, ranks, batch_source=Interrupted(ending) if mine else Given(batches(6)))
        case "empty":
            return trainer_of(
                replace(run, cfg={"max_lag": 0, "max_empty_batches": 2}), ranks, batch_source=_empty(ranks)
            )
        case "one_empty":
            source = Given([[], [], *batches(1)]) if mine else Given(batches(1) * 2)
            return trainer_of(replace(run, cfg={"max_empty_batches": 2}), ranks, batch_source=source)
        case "other_lr":
            return trainer_of(replace(run, cfg={"lr": 1e-3 if mine else 1e-2}), ranks)
        case "other_model":
            return trainer_of(replace(run, tied=mine), ranks)
        case "other_sources":
            return trainer_of(run, ranks, batch_source=Given(batches(2)) if mine else None)
        case "not_sharded":
            return trainer_of(run, ranks, model=llama())
        case "publisher":
            return trainer_of(run, ranks, publisher=BrokenPublisher() if ranks.is_first else None)
        case "no_evaluator":
            return trainer_of(replace(run, cfg={"eval_every_n_steps": 1}), ranks)
        case "evaluation":
            cfg = {"eval_every_n_steps": 1}
            return trainer_of(replace(run, cfg=cfg), ranks, evaluator=SlowEvaluator() if ranks.is_first else None)
        case "broken_update":
            return trainer_of(run, ranks, algo=replace(Run().make_algo(), loss=Breaking(breaks=mine)))
        case "not_finite":
            return _spoilt_on_one(trainer_of(run, ranks), is_here=mine)
        case "killed":
            return _killed(run, ranks, folder)
    raise ValueError(ending)


def _empty(ranks: Ranks) -> Given | None:
    return Given([[], [], []]) if ranks.is_first else None


def _spoilt_on_one(trainer: Trainer, *, is_here: bool) -> Trainer:
    """The second step makes NaN of this rank's part of a weight."""

    def spoil(*_: object) -> None:
        if is_here and trainer.step == 1:
            weight = trainer.model.get_parameter("model.norm.weight")
            weight.to_local().detach().fill_(float("nan"))

    trainer.optimizer.register_step_post_hook(spoil)
    return trainer


def _killed(run: Run, ranks: Ranks, folder: Path) -> Trainer:
    """The first time, rank 1 is killed in its fourth step; the second time the run goes on from its last checkpoint."""
    config = CheckpointConfig(folder / "checkpoints", every_n_steps=1, max_to_keep=None)
    is_again = (folder / "killed").exists()
    trainer = trainer_of(
        replace(run, steps=6), ranks, checkpoint_config=config, resume_from="latest" if is_again else None
    )
    (folder / f"resumed-{ranks.rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(str(trainer.step))
    ranks.barrier()
    if ranks.rank == 1 and not is_again:
        plain = trainer.learner.update

        def killed_update(step: int, *args: Any) -> Any:
            if step == 3:
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(step, *args)

        trainer.learner.update = killed_update  # type: ignore[method-assign]
    return trainer


def main(folder: Path, endings: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_s=60, device="cpu")
    for ending in endings:
        report: dict[str, Any] = {"error": None}
        trainer = gone = None
        try:
            trainer = made(ending, ranks, folder)
            report["stats"] = trainer.train_sync()
        except Exception as error:  # noqa: BLE001 - it goes into the report
            report["error"] = f"{type(error).__name__}: {error}"
            gone = error if ending in ("broken_update", "killed") else None
        finally:
            if trainer is not None:
                report |= {"step": trainer.step, "eval": trainer._evaluation.last}
            (folder / f"{ending}-{ranks.rank}.json").write_text(json.dumps(report))
        if gone is not None:  # the group is gone: so must we, which ends the others
            if ending == "broken_update" and ranks.rank == 1:
                os._exit(0)  # the other notices the end of this process, not a signal from the one that started both
            raise gone
        ranks.barrier(timeout_s=60)
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
