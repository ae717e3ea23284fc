"""`Trainer`: batches in, weights out. It knows nothing of episodes; how a policy is trained is its `Learner`'s part.

One step is: fetch a batch, update, publish, report; between steps it evaluates and saves. Where a batch takes several steps,
it is fetched before the first and the weights are published after the last. What takes long runs in a thread, so that the next
batch is generated meanwhile. Each of several ranks runs this loop, and the learner shares every batch out.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from ludic.compat import also_accepts, only_known
from ludic.training.algorithms import RLAlgorithm
from ludic.training.causes import LearningWatch
from ludic.training.checkpoint.rng import restore_rng, rng_state
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.evaluation import Evaluation, check_evaluation
from ludic.training.guards import check_parity
from ludic.training.learner.batches import PreparedBatch, RankBatch, data_states, describe, fetch, load_data_states
from ludic.training.learner.interface import Learner
from ludic.training.learner.metrics import prefixed
from ludic.training.learner.mini_batches import BatchInProgress, groups_of
from ludic.training.learner.publish import ParamFilter
from ludic.training.learner.torch_learner import LearnerParts, TorchLearner
from ludic.training.loggers import Resumable
from ludic.types import (
    AccountsForItems,
    BatchSource,
    ChecksSamples,
    ConfigError,
    Evaluator,
    FollowsVersions,
    PolicyPublisher,
    Reducer,
    RequestsExhausted,
    TrainingLogger,
)
from ludic.types.interfaces import UnsavedState, own_parts
from ludic.util.stop import StopRequested, StopSignal, run_sync

if TYPE_CHECKING:
    from ludic.training.checkpoint.manager import CheckpointManager

logger = logging.getLogger(__name__)

_UNFINISHED = "unfinished_batch"


class TrainingLoop:
    """The loop of one policy, over any learner. `Trainer` and `TinkerTrainer` make the learner."""

    def __init__(
        self,
        learner: Learner,
        batch_source: BatchSource | None,
        resume_from: int | str | None = None,
        train_logger: TrainingLogger | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self.learner, self.algo, self.cfg = learner, learner.algo, learner.cfg
        self.batch_source, self.logger, self.reducers = batch_source, train_logger, reducers
        self.checkpointer = learner.checkpointer
        self.stop = StopSignal()
        self.step = 0
        """Optimizer steps done; also the version of the policy."""
        self._evaluation = Evaluation(evaluator, self.cfg, self._log)
        self._watch = LearningWatch()
        self._log_lock = threading.Lock()
        """A step is logged from a thread, a background evaluation from the event loop; loggers see one at a time."""
        self._unsaved = UnsavedState(own_parts(self.algo, "algo").values())
        self._last_saved: int | None = None
        self._data_before_batch: dict[str, Any] | None = None
        """The data's position before the batch that is being fetched or trained on; None between steps."""
        self._unfinished: BatchInProgress | None = None
        """The batch that the next step goes on with; None if it fetches one."""
        self._batch_began = 0
        """The step from which the latest batch was trained on."""
        self._num_fetched = 0
        """Number of samples of the current batch that came from this process's source."""
        learner.check(lambda: self._check(resume_from))
        if resume_from is not None:
            self._resume(resume_from)
        else:
            learner.begin(self.step, is_resumed=False)
            self._notify_source()

    def _check(self, resume_from: int | str | None) -> None:
        learner = self.learner
        check_evaluation(self.cfg, self.evaluator, is_first=learner.is_first, shares_weights=learner.shares_weights)
        if resume_from is not None and self.checkpointer is None:
            raise ConfigError(
                f"resume_from={resume_from!r} needs a checkpointer; {type(self).__name__} needs a checkpoint_config to make one."
            )

    @property
    def current_step(self) -> int:
        return self.step

    @property
    def evaluator(self) -> Evaluator | None:
        return self._evaluation.evaluator

    # --- the loop ---

    async def train(self, num_steps: int | None = None) -> dict[str, float]:
        """`num_steps` more steps, or until the source has no more; returns the last step's metrics."""
        stats: dict[str, float] = {}
        self.stop = StopSignal()
        end = None if num_steps is None else self.step + num_steps
        try:
            with self.stop.catch_signals(), self.learner.watch():
                is_first = self.cfg.eval_at_start and self.step == 0
                if is_first or (self._evaluation.is_missing and self._unfinished is None):
                    await self._evaluate()
                # Several processes stop together, at the next batch: sharing it tells all of them.
                while (end is None or self.step < end) and not (self.stop.is_set and self.learner.is_alone):
                    try:
                        stats = await self._step()
                    except (RequestsExhausted, StopRequested) as reason:
                        logger.info("training ends at step %d: %s", self.step, reason or type(reason).__name__)
                        break
                    self._evaluation.check()
                    if self._unfinished is None and self._evaluation.is_due(self.step, self._batch_began):
                        await self._evaluate()  # before saving: it may decide which checkpoint is the best
                    await self.save_if_due(stats)
                if self.checkpointer is not None:
                    if self.step and self._last_saved != self.step:
                        await self._save(stats)
                    await asyncio.to_thread(self.checkpointer.finish)
                await self._evaluation.finish()
        finally:
            await self._evaluation.cancel()
        return stats

    async def train_step(self, *, save: bool = True) -> dict[str, float]:
        """One optimizer step, on a new batch or on the next part of the last one. Without `save` the caller calls
        `save_if_due`, after an evaluation that may decide which checkpoint is the best."""
        with self.learner.watch():
            stats = await self._step()
            if save:
                await self.save_if_due(stats)
        return stats

    async def _step(self) -> dict[str, float]:
        started, step = time.perf_counter(), self.step
        if self._unfinished is None:
            self._data_before_batch = data_states(self.algo, self.batch_source)
            await asyncio.to_thread(self.learner.check_servers, step)
            shared = await self._next_batch()
            fetched = time.perf_counter()
            batch, part = await asyncio.to_thread(self._begin_batch, shared)
        else:
            fetched, batch = started, self._unfinished
            part = await asyncio.to_thread(self.learner.share_part, batch.part())
        found = await asyncio.to_thread(self.learner.update, step, part, partial(self._note_trained, batch))
        updated = time.perf_counter()
        if step == 0 and self.learner.is_first:
            check_parity(found, self.cfg.parity_tolerance)
        if batch.is_finished:
            await asyncio.to_thread(self._publish)
        published = time.perf_counter()
        times = {"fetch_s": fetched - started, "update_s": updated - fetched, "publish_s": published - updated}
        speed = {"tokens_per_s": part.stats["num_tokens"] / times["update_s"]}
        if "perf/prefix_sharing" in found:
            speed["unique_tokens_per_s"] = speed["tokens_per_s"] / found["perf/prefix_sharing"]
        stats = {**batch.stats, **found, **batch.note(found), **times, **speed}
        return await asyncio.to_thread(self._report, stats, started)

    # --- phases ---

    async def _next_batch(self) -> RankBatch:
        """This process's part of the next batch."""
        try:
            own: PreparedBatch | Exception = await self._fetch()
        except Exception as error:  # noqa: BLE001 - `share` tells other processes before it raises
            own = error
        self._num_fetched = len(own.items) if isinstance(own, PreparedBatch) else 0
        metrics = partial(describe, step=self.step, reducers=self.reducers, tokenizer=self.learner.tokenizer)
        return await asyncio.to_thread(self.learner.share, own, metrics)

    def _begin_batch(self, shared: RankBatch) -> tuple[BatchInProgress, RankBatch]:
        """The batch, and this process's part of its first update."""
        prepared, cfg = self.learner.prepare(shared), self.cfg
        if cfg.steps_per_batch == 1:
            return BatchInProgress.begin([], shared.stats, self.step, cfg, num_groups=1), prepared
        items = self.learner.collect(prepared)
        num_groups = self.learner.broadcast(len(groups_of(items)))
        batch = BatchInProgress.begin(items, shared.stats, self.step, cfg, num_groups)
        return batch, self.learner.share_part(batch.part())

    async def _fetch(self) -> PreparedBatch:
        """The batch of this process's source; empty if only the first process has one."""
        if self.stop.is_set:
            raise StopRequested(self.stop.reason or "")
        if self.batch_source is None:
            return PreparedBatch([])
        return await self.stop.unless(fetch(self.batch_source, self.algo, self.cfg, self.step))

    def _note_trained(self, batch: BatchInProgress) -> None:
        """Called when the weights have changed: the batch counts as trained on, even if a later phase fails.

        From its first update on a checkpoint holds what is left of the batch, and its source need not keep it.
        """
        self.step += 1
        batch.num_done += 1
        self._data_before_batch = None
        self._unfinished = None if batch.is_finished else batch
        self._batch_began = batch.first_step
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_trained(self.step, self._num_fetched)
        self._num_fetched = 0

    def _publish(self) -> None:
        if self.learner.publish(self.step, self._batch_began):
            self._notify_source()

    def _notify_source(self) -> None:
        """Called once the weights are published: the source's next batch is sampled with them."""
        if isinstance(self.batch_source, FollowsVersions):
            self.batch_source.notify_version(self.step)

    def _report(self, stats: dict[str, float], started: float) -> dict[str, float]:
        """Log what is due, before the checkpoint is saved: a process that is killed in between loses no line."""
        named = prefixed({**stats, "step": float(self.step)})
        named["perf/step_s"] = time.perf_counter() - started
        if self.learner.is_first:
            self._watch.note(named)
        if self.step % self.cfg.log_every == 0:
            self._log(self.step, named)
        return named

    def _log(self, step: int, stats: Mapping[str, float]) -> None:
        if self.logger is not None and self.learner.is_first:
            with self._log_lock:
                self.logger.log(step, stats)

    # --- evaluation, checkpoints ---

    async def eval(self) -> dict[str, float]:
        """The evaluator's metrics of the weights as they are, logged under eval/."""
        return await self._evaluation.run_now(self.step)

    async def _evaluate(self) -> None:
        """On the first process; the others wait for its result."""
        if self.learner.is_first:
            await self._evaluation.run(self.step, self.stop)
        if not self.learner.is_alone:
            result = await asyncio.to_thread(self.learner.broadcast, self._evaluation.last)
            if not self.learner.is_first:
                self._evaluation.last, self._evaluation.is_missing = result, False

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save everything that a resumed run needs to continue as if it had not stopped."""
        self._write(self._state(), metrics or {})

    def note_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of an evaluation that was made elsewhere, `eval/step` among them."""
        self._evaluation.last = dict(metrics)

    async def save_if_due(self, stats: Mapping[str, float]) -> None:
        """Save a checkpoint if one is due at this step; `stats` are those of the step."""
        if self.checkpointer is not None and self.checkpointer.should_save(self.step):
            await self._save(stats)

    async def _save(self, stats: Mapping[str, float]) -> None:
        """The state is taken in the event loop, where a source that generates ahead changes its own."""
        assert self.checkpointer is not None, "only called to save"
        await self._evaluation.wait_for_metric(self.step, self.checkpointer.config.best_metric)
        metrics = {**self._evaluation.metrics_of(self.step), **stats}
        await asyncio.to_thread(self._write, self._state(), metrics)

    def _state(self) -> dict[str, Any]:
        """With the data's position before the first batch that was not trained on: a resumed run makes that one again. A batch that
        was trained on in part is in the state itself."""
        data = (
            self._data_before_batch
            if self._data_before_batch is not None
            else data_states(self.algo, self.batch_source)
        )
        state = {"step": self.step, "rng": rng_state(), **data}
        return state if self._unfinished is None else {**state, _UNFINISHED: self._unfinished.state_dict()}

    def _write(self, state: dict[str, Any], metrics: Mapping[str, float]) -> None:
        if self.checkpointer is None:
            raise RuntimeError(
                f"There is no checkpointer; give {type(self).__name__}(checkpoint_config=CheckpointConfig(…))."
            )
        self._unsaved.warn()
        self.learner.save(self.step, state, metrics, partial(self._notify_saved, self.step))
        self._last_saved = self.step

    def _notify_saved(self, step: int, folder: Path) -> None:
        """Called once the checkpoint is on disk; with several ranks some time after `save` returned."""
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_saved(step)

    def _resume(self, where: int | str) -> None:
        if isinstance(where, int) or str(where).isdecimal():
            state = self.learner.load(step=int(where))
        else:
            state = self.learner.load(path=None if where == "latest" else where)
        self.step = int(state["step"])
        load_data_states(self.algo, self.batch_source, state)
        if _UNFINISHED in state:
            self._unfinished = BatchInProgress.load(state[_UNFINISHED], is_first=self.learner.is_first)
        self.learner.begin(self.step, is_resumed=True)
        self._notify_source()
        if isinstance(self.logger, Resumable) and self.learner.is_first:
            self.logger.resume(self.step)
        evaluated = self.step if self._unfinished is None else self._unfinished.first_step
        self._evaluation.find_missing(evaluated, self.logger if self.learner.is_first else None)
        self._evaluation.is_missing = self.learner.broadcast(self._evaluation.is_missing)
        restore_rng(state.get("rng", {}))
        logger.info("resumed at step %d", self.step)

    # --- without asyncio ---

    def train_sync(self, num_steps: int | None = None) -> dict[str, float]:
        """`train`, also if an event loop is running already, as in a notebook."""
        return run_sync(self.train(num_steps), lambda: self.stop)

    def train_step_sync(self) -> dict[str, float]:
        return run_sync(self.train_step())

    def eval_sync(self) -> dict[str, float]:
        return run_sync(self.eval())


class TrainerParts(LearnerParts, total=False):
    """The further arguments of `Trainer`."""

    enable_gradient_checkpointing: bool | None
    """Another spelling of `TrainerConfig(gradient_checkpointing=True)`."""


@also_accepts(TrainerParts)
class Trainer(TrainingLoop):
    """Trains a torch model, in one process or on several ranks."""

    learner: TorchLearner

    def __init__(
        self,
        *,
        model: Any,
        algo: RLAlgorithm,
        batch_source: BatchSource | None,
        cfg: TrainerConfig | None = None,
        resume_from: int | str | None = None,
        train_logger: TrainingLogger | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        evaluator: Evaluator | None = None,
        publisher: PolicyPublisher | None = None,
        param_filter: ParamFilter | None = None,
        checkpointer: "CheckpointManager | None" = None,
        checkpoint_config: CheckpointConfig | None = None,
        **others: Unpack[TrainerParts],
    ) -> None:
        """With several ranks the model is sharded (shard_model); `batch_source` may be None on all ranks but the first, which
        then feeds all. Publisher, logger and evaluator are only used on the first. `others`: see `LearnerParts`."""
        only_known(type(self).__name__, others, TrainerParts)
        cfg = cfg if cfg is not None else TrainerConfig()
        if others.pop("enable_gradient_checkpointing", None):
            cfg = replace(cfg, gradient_checkpointing=True)
        self.model, self.cfg = model, cfg
        self.learner = learner = TorchLearner(
            model=model,
            algo=algo,
            cfg=cfg,
            has_source=batch_source is not None,
            publisher=publisher,
            param_filter=param_filter,
            checkpointer=checkpointer,
            checkpoint_config=checkpoint_config,
            **cast(LearnerParts, others),
        )
        self.policy, self.critic = learner.policy, learner.critic
        self.optimizer = self.initialize_optimizer()
        learner.use_optimizer(self.optimizer)
        if isinstance(batch_source, ChecksSamples):
            from ludic.training.sample_check import TrainableSamples  # loaded for samples of other processes

            batch_source.use_sample_check(TrainableSamples(algo, cfg, model, reducers))
        super().__init__(learner, batch_source, resume_from, train_logger, reducers, evaluator)

    @property
    def publisher(self) -> PolicyPublisher | None:
        return self.learner.updates.publisher

    def initialize_optimizer(self) -> Any:
        """AdamW over everything trainable; override for another."""
        return self.learner.make_optimizer()
