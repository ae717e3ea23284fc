"""`TinkerTrainer`: the loop of `Trainer` with the weights at Tinker. Batches go there, log-probs come back.

    policy = TinkerPolicy(TinkerConfig(base_model="Qwen/Qwen3-8B"))
    agents talk to policy.client
    TinkerTrainer(model=policy, algo=…, batch_source=…, cfg=TrainerConfig(…)).train_sync(100)

It takes the same arguments as `Trainer`, less what only a model in this process can have (publisher, reference, ranks).
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.tinker.data import built_in_of, check_items, check_loss, rows_of, tokens_of
from ludic.tinker.policy import TinkerPolicy, Trained
from ludic.training.algorithms import RLAlgorithm
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.state_files import read_state
from ludic.training.config import TrainerConfig
from ludic.training.guards import check_parity
from ludic.training.learner.evaluation import Evaluation
from ludic.training.learner.gradients import batch_facts
from ludic.training.learner.metrics import MetricSums, prefixed
from ludic.training.learner.prepare import data_states, describe, fetch, load_data_states
from ludic.training.learner.rank_batches import PreparedBatch
from ludic.training.learner.rng import restore_rng, rng_state
from ludic.training.learner.stop import StopRequested, StopSignal, run_sync
from ludic.training.loggers import Resumable
from ludic.training.losses import ActionTokens, BatchFacts, Loss, mismatch_stats
from ludic.training.losses.corrections import effective_sample_size
from ludic.types import (
    AccountsForItems,
    BatchSource,
    ConfigError,
    Evaluator,
    FollowsDrift,
    FollowsVersions,
    NotFinite,
    Reducer,
    RequestsExhausted,
    SAWItem,
    TrainingLogger,
)

# ----------------------------------------------------------------------------------------------------
# Checkpoints of a policy that is trained elsewhere: its weights stay there, and a folder here says where, and all the rest.
# ----------------------------------------------------------------------------------------------------
#     output_dir/step_000100/   trainer_state.json (with the tinker:// path), ranks/, manifest.json
#
# The folder is written after the service has saved, so one that is there can be resumed from. Removing a folder removes
# nothing at the service.


class RemoteCheckpoints(CheckpointManager):
    """The same folders, pointers and pruning, without weights."""

    def save_path(self, step: int, path: str, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Note that `path` holds the weights and the optimizer of this step."""
        try:
            return self.save(step, model=torch.nn.Module(), state={**state, "remote_path": path}, metrics=metrics)
        except CheckpointError as error:
            raise CheckpointError(f"{error} The weights are safe at {path}.") from error

    def _write_model(self, model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
        return {}

    def read_path(self, where: int | str) -> tuple[str, dict[str, Any]]:
        """(where the weights are, the state beside them) of a step, of a folder, or of the "latest"."""
        if isinstance(where, int) or where.isdigit():
            folder = self.find(step=int(where))
        else:
            folder = self.find(path=None if where == "latest" else where)
        state = read_state(folder)
        if "remote_path" not in state:
            raise CheckpointError(f"{folder} holds a model of its own, and no path at Tinker. Resume it with Trainer.")
        return state.pop("remote_path"), state


# ----------------------------------------------------------------------------------------------------
# One optimizer step at Tinker, and the same statistics of it that a local step reports.
# ----------------------------------------------------------------------------------------------------


_LOSS_TOLERANCE = 1e-2
"""Share of the loss by which the service's own may differ from what its log-probs give, before a warning says so."""


def train_remotely(
    policy: TinkerPolicy, loss: Loss, items: Sequence[SAWItem], adam: Mapping[str, float]
) -> dict[str, float]:
    """Gradient and step. Whatever the loss reports is computed here, from the log-probs that the service used."""
    check_items(items)
    facts, built_in = batch_facts(items), built_in_of(loss)
    rows = rows_of(items, loss, facts)

    def value_of(logprobs: Sequence[Tensor]) -> Tensor:
        return loss(tokens_of(items, logprobs, facts))[0]

    trained = policy.train(rows, built_in if built_in is not None else value_of, adam)
    stats = _stats(loss, items, trained, facts)
    _check(stats, trained)
    if (norm := trained.metrics.get("unclipped_grad_l2:mean")) is not None:
        stats["grad_clipped"] = float(0.0 < adam["grad_clip_norm"] < norm)
    return {**stats, **{_plain(name): value for name, value in trained.metrics.items()}}


def adam_settings(cfg: TrainerConfig, step: int) -> dict[str, float]:
    """The trainer's settings of this step, as Tinker's AdamW takes them."""
    rate = cfg.lr * (cfg.lr_schedule(step) if cfg.lr_schedule is not None else 1.0)
    return {
        "learning_rate": rate,
        "beta1": cfg.betas[0],
        "beta2": cfg.betas[1],
        "eps": cfg.eps,
        "weight_decay": cfg.weight_decay,
        "grad_clip_norm": cfg.max_grad_norm or 0.0,
    }


@torch.no_grad()
def _stats(loss: Loss, items: Sequence[SAWItem], trained: Trained, facts: BatchFacts) -> dict[str, float]:
    tokens: ActionTokens = tokens_of(items, [torch.tensor(own) for own in trained.logprobs], facts)
    value, reported = loss(tokens)
    sums = MetricSums()
    sums.add({"loss": (value, 1.0), **reported, **mismatch_stats(tokens)})
    return effective_sample_size(sums.means())


def _check(stats: Mapping[str, float], trained: Trained) -> None:
    """Nothing here sees weights or gradients; what can be seen is every number that the service reports, and whether both
    sides mean the same loss."""
    ours, theirs = stats["loss"], trained.metrics.get("loss:sum", stats["loss"])
    reported = {"the loss": ours, **{f"Tinker's {name}": value for name, value in trained.metrics.items()}}
    bad = [f"{name} is {value}" for name, value in reported.items() if not math.isfinite(value)]
    if bad:
        raise NotFinite(
            f"{', '.join(bad)}, and the step was taken: the weights there are spoilt. Go on from the last checkpoint, with a "
            "lower lr; look at the batch's log-probs and weights."
        )
    if abs(ours - theirs) > _LOSS_TOLERANCE * max(abs(ours), abs(theirs), 1e-2):
        logger.warning(
            "Tinker's loss is %.5g, but its log-probs give %.5g: it does not compute the loss asked for.", theirs, ours
        )


def _plain(name: str) -> str:
    """ "loss:sum" is tinker_loss_sum."""
    return "tinker_" + name.replace(":", "_").replace("/", "_")


logger = logging.getLogger(__name__)


class TinkerTrainer:
    """The loop of one policy that is trained elsewhere."""

    def __init__(
        self,
        *,
        model: TinkerPolicy,
        algo: RLAlgorithm,
        batch_source: BatchSource,
        cfg: TrainerConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        resume_from: int | str | None = None,
        train_logger: TrainingLogger | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self.cfg = cfg if cfg is not None else TrainerConfig()
        self.model, self.algo, self.batch_source = model, algo, batch_source
        self.logger, self.reducers = train_logger, reducers
        self.checkpoints = None if checkpoint_config is None else RemoteCheckpoints(checkpoint_config)
        check_loss(algo.loss, algo.name)
        _check_settings(self.cfg, algo, has_evaluator=evaluator is not None)
        self.step = 0
        """Optimizer steps done; also the version of the policy."""
        self._evaluating = Evaluation(evaluator, self.cfg, self._log)
        self._last_saved: int | None = None
        self._untrained_from: dict[str, Any] | None = None
        """Where data stood before the batch that is being fetched or trained on; None between steps."""
        self.stop = StopSignal()
        if resume_from is not None:
            self._resume(resume_from)
        else:
            self._notify_source()

    # --- the loop ---

    async def train(self, num_steps: int | None = None) -> dict[str, float]:
        """`num_steps` more steps, or until the source has no more; the last step's numbers come back."""
        stats: dict[str, float] = {}
        self.stop = StopSignal()
        end = None if num_steps is None else self.step + num_steps
        with self.stop.listening():
            if self.cfg.eval_at_start and self.step == 0:
                await self._evaluating.run(self.step, self.stop)
            while (end is None or self.step < end) and not self.stop.is_set:
                try:
                    stats = await self._step()
                except (RequestsExhausted, StopRequested) as reason:
                    logger.info("training ends at step %d: %s", self.step, reason or type(reason).__name__)
                    break
                if self._evaluating.is_due(self.step):
                    await self._evaluating.run(self.step, self.stop)
                await self._save_if_due(stats)
            if self.checkpoints is not None and self.step and self._last_saved != self.step:
                await self._save(stats)  # however it ended, what was learned is kept
        return stats

    async def train_step(self) -> dict[str, float]:
        """One batch, one optimizer step."""
        stats = await self._step()
        await self._save_if_due(stats)
        return stats

    async def _step(self) -> dict[str, float]:
        started = time.perf_counter()
        self._untrained_from = data_states(self.algo, self.batch_source)
        whole = await self.stop.unless(fetch(self.batch_source, self.algo, self.cfg, self.step))
        fetched = time.perf_counter()
        stats = await asyncio.to_thread(self._update, whole)
        updated = time.perf_counter()
        if self._publishes_now():
            await asyncio.to_thread(self.model.publish, self.step)
            self._notify_source()
        stats |= {
            "fetch_s": fetched - started,
            "update_s": updated - fetched,
            "publish_s": time.perf_counter() - updated,
        }
        stats["tokens_per_s"] = stats["num_tokens"] / stats["update_s"]
        return await asyncio.to_thread(self._report, stats, started)

    # --- phases ---

    def _update(self, whole: PreparedBatch) -> dict[str, float]:
        """Gradient and optimizer step, there."""
        described = describe(whole, self.step, self.reducers, self.model.tokenizer)
        adam = adam_settings(self.cfg, self.step)
        stats = train_remotely(self.model, self.algo.loss, whole.items, adam)
        if self.step == 0:
            check_parity(stats, self.cfg.parity_tolerance)
        self.step += 1
        self._untrained_from = None
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_trained(self.step, len(whole.items))
        return {**described, **stats, "lr": adam["learning_rate"]}

    def _publishes_now(self) -> bool:
        every = 1 if self.cfg.sync_every_steps is None else self.cfg.sync_every_steps
        return every > 0 and self.step % every == 0

    def _notify_source(self) -> None:
        if isinstance(self.batch_source, FollowsVersions):  # only now: its next batch is sampled with these
            self.batch_source.notify_version(self.step)

    def _report(self, stats: dict[str, float], started: float) -> dict[str, float]:
        """Log what is due; saving comes after: a kill in between loses no line."""
        named = prefixed({**stats, "step": float(self.step)})
        named["perf/step_s"] = time.perf_counter() - started
        if self.step % self.cfg.log_every == 0:
            self._log(self.step, named)
        return named

    def _log(self, step: int, stats: Mapping[str, float]) -> None:
        if self.logger is not None:
            self.logger.log(step, stats)

    # --- evaluation, checkpoints ---

    async def eval(self) -> dict[str, float]:
        """The evaluator's metrics of the published weights, logged under eval/."""
        return await self._evaluating.now(self.step)

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """Everything that a resumed run needs to go on as if nothing had happened."""
        self._write(self._state(), metrics or {})

    async def _save_if_due(self, stats: Mapping[str, float]) -> None:
        if self.checkpoints is not None and self.checkpoints.should_save(self.step):
            await self._save(stats)

    async def _save(self, stats: Mapping[str, float]) -> None:
        """The state is taken here, in the event loop: whatever generates ahead changes its own here, too."""
        metrics = {**self._evaluating.found_of(self.step), **stats}
        await asyncio.to_thread(self._write, self._state(), metrics)

    def _state(self) -> dict[str, Any]:
        """Data as it stood before the first batch that has not been trained on: that one is made again."""
        data = self._untrained_from if self._untrained_from is not None else data_states(self.algo, self.batch_source)
        return {"step": self.step, "rng": rng_state(), **data}

    def _write(self, state: dict[str, Any], metrics: Mapping[str, float]) -> None:
        if self.checkpoints is None:
            raise RuntimeError("Nobody said where; give TinkerTrainer(checkpoint_config=CheckpointConfig(…)).")
        path = self.model.save_state(f"step_{self.step:06d}")
        self.checkpoints.save_path(self.step, path, state, metrics)
        self._last_saved = self.step
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_saved(self.step)

    def _resume(self, where: int | str) -> None:
        if self.checkpoints is None:
            raise ConfigError(f"resume_from={where!r} needs a checkpoint_config.")
        path, state = self.checkpoints.read_path(where)
        self.model.load_state(path)
        self.step = int(state["step"])
        load_data_states(self.algo, self.batch_source, state)
        self.model.publish(self.step)
        self._notify_source()
        if isinstance(self.logger, Resumable):
            self.logger.resume(self.step)
        restore_rng(state["rng"])
        logger.info("resumed at step %d from %s", self.step, path)

    # --- without asyncio ---

    def train_sync(self, num_steps: int | None = None) -> dict[str, float]:
        """`train`, also where an event loop runs already: a notebook."""
        return run_sync(self.train(num_steps), lambda: self.stop)

    def train_step_sync(self) -> dict[str, float]:
        return run_sync(self.train_step())


def _check_settings(cfg: TrainerConfig, algo: RLAlgorithm, *, has_evaluator: bool) -> None:
    """ConfigError for what was asked of a model that is not here."""
    asked = {
        "compile": cfg.compile,
        "gradient_checkpointing": cfg.gradient_checkpointing,
        "model_device": cfg.model_device,
        "eval_in_background": cfg.eval_in_background,
    }
    unknown = [name for name, value in asked.items() if value]
    if unknown:
        raise ConfigError(f"TrainerConfig.{', '.join(unknown)} cannot be had with TinkerTrainer. Leave it out.")
    if isinstance(algo.credit_assigner, FollowsDrift):
        raise ConfigError(
            f"{algo.name} follows how far each step moves the policy, which Tinker does not say. Use Trainer."
        )
    if (cfg.eval_at_start or cfg.eval_every_n_steps) and not has_evaluator:
        raise ConfigError("eval_at_start or eval_every_n_steps is set, but there is no evaluator.")
