"""`Trainer`: batches in, weights out. It never hears of episodes.

One step reads as its phases: fetch a batch, keep what can be trained on, accumulate its gradient, step, publish, report.
The heavy part runs in a thread, so that whatever generates the next batch goes on meanwhile.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ludic.distributed.shared_weights import SharedWeightsPublisher
from ludic.models.compiling import compile_layers
from ludic.models.head import plain_model
from ludic.models.lora import dense_parameters
from ludic.training.algorithms import RLAlgorithm
from ludic.training.background_eval import BackgroundEval
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.critic import ValueHead, expected_values
from ludic.training.full_precision import FullPrecisionAdamW, is_narrow
from ludic.training.guards import check_masks, check_model, check_parity
from ludic.training.loggers import Resumable
from ludic.training.losses.mismatch import effective_share
from ludic.training.packing import TooLong, fit_length
from ludic.training.policy import TrainedPolicy
from ludic.training.rng import restore_rng, rng_state
from ludic.training.stats import batch_stats, prefixed
from ludic.training.stopping import StopRequested, StopSignal
from ludic.training.update import AdapterOff, FrozenReference, Reference, accumulate_gradients, micro_batches
from ludic.types import (
    AccountsForItems,
    AdapterPublisher,
    BatchSource,
    ChecksServers,
    ConfigError,
    Evaluator,
    FollowsVersions,
    InPlacePublisher,
    LudicError,
    PolicyPublisher,
    Reducer,
    RequestsExhausted,
    SAWBatch,
    SAWItem,
    Stateful,
    TakesSnapshots,
    TrainingLogger,
)

logger = logging.getLogger(__name__)


class NothingToTrainOn(LudicError, RuntimeError):
    """Batch after batch had no sample left."""


@dataclass(slots=True)
class Prepared:
    """A batch that can be trained on, and what was left out of it."""

    items: list[SAWItem]
    meta: dict[str, Any]
    counts: dict[str, float] = field(default_factory=dict)


class Trainer:
    """The loop of one policy."""

    def __init__(
        self,
        *,
        model: Any,
        algo: RLAlgorithm,
        batch_source: BatchSource,
        cfg: TrainerConfig | None = None,
        publisher: PolicyPublisher | None = None,
        param_filter: Callable[[str, torch.Tensor], bool] | None = None,
        enable_gradient_checkpointing: bool = False,
        checkpointer: CheckpointManager | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        resume_from: int | str | None = None,
        train_logger: TrainingLogger | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        evaluator: Evaluator | None = None,
        reference: Any = None,
        tokenizer: Any = None,
    ) -> None:
        self.cfg = cfg if cfg is not None else TrainerConfig()
        self.model, self.algo, self.batch_source = model, algo, batch_source
        self.publisher, self.param_filter = publisher, param_filter
        self.logger, self.reducers, self.evaluator, self.tokenizer = train_logger, reducers, evaluator, tokenizer
        self.checkpointer = checkpointer or (CheckpointManager(checkpoint_config) if checkpoint_config else None)
        self._check_parts(resume_from)
        self._prepare_model(enable_gradient_checkpointing or self.cfg.gradient_checkpointing)
        self.policy = TrainedPolicy(model, packed=self.cfg.packed, mixed_precision_dtype=self.cfg.mixed_precision_dtype)
        if self.cfg.compile:  # after the policy has looked at its layers
            compile_layers(model)
        self.reference = self._make_reference(reference)
        self.value_head = self._make_value_head()
        self.optimizer = self.initialize_optimizer()
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0
        """Optimizer steps done; also the version of the policy."""
        self._last_eval: dict[str, float] = {}
        self._background = BackgroundEval()
        self._logging = threading.Lock()
        """A step is reported from a thread, an evaluation beside it from the event loop; loggers see one at a time."""
        self._last_saved: int | None = None
        self._published: int | None = None
        """The version that other processes serve, as far as we know; None before the first."""
        self._untrained_from: dict[str, Any] | None = None
        """Where data stood before the batch that is being fetched or trained on; None between steps."""
        self.stop = StopSignal()
        torch.manual_seed(self.cfg.seed)
        check_model(model)
        if resume_from is not None:
            self._resume(resume_from)
        else:
            self._announce_version()

    @property
    def current_step(self) -> int:
        return self.step

    # --- making ---

    def _check_parts(self, resume_from: int | str | None) -> None:
        cfg = self.cfg
        if cfg.sync_every_steps and self.publisher is None:
            raise ConfigError(f"sync_every_steps={cfg.sync_every_steps}, but there is no publisher to sync through.")
        if isinstance(self.publisher, SharedWeightsPublisher):
            self.publisher.require_shared(self.model)
        if isinstance(self.publisher, AdapterPublisher):
            self.publisher.require_trained(self.model)
            if self.param_filter is not None:
                raise ConfigError(
                    "param_filter chooses among merged weights, but the publisher sends the adapter alone."
                )
        if isinstance(self.publisher, InPlacePublisher) and cfg.sync_every_steps not in (None, 1):
            raise ConfigError(
                f"sync_every_steps={cfg.sync_every_steps}, but {type(self.publisher).__name__} serves the very weights that are "
                "trained: every step is published. Leave it None."
            )
        if (cfg.eval_at_start or cfg.eval_every_n_steps) and self.evaluator is None:
            raise ConfigError("eval_at_start or eval_every_n_steps is set, but there is no evaluator.")
        shares_weights = isinstance(self.publisher, InPlacePublisher)
        if cfg.eval_in_background and shares_weights and not isinstance(self.evaluator, TakesSnapshots):
            raise ConfigError(
                "eval_in_background=True, but the engine serves the very weights that are trained: they would change in the middle "
                "of an evaluation. Evaluate on a copy: SnapshotEvaluator(evaluator, EngineSnapshot(engine)), whose agents talk to "
                "the snapshot."
            )
        if resume_from is not None and self.checkpointer is None:
            raise ConfigError(f"resume_from={resume_from!r} needs a checkpointer or a checkpoint_config.")

    def _prepare_model(self, with_checkpointing: bool) -> None:
        if self.cfg.model_device is not None:
            self.model.to(self.cfg.model_device)
        self.model.train()
        if with_checkpointing:
            inner = plain_model(self.model)
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # Without re-entrance inputs need no gradient, and the hook for it would cost the engine its fast way.
            inner.disable_input_require_grads()

    def _make_reference(self, reference: Any) -> Reference | None:
        if not self.algo.loss.needs_reference:
            return None
        if reference is not None:
            frozen = reference.to(self.policy.device).eval().requires_grad_(False)
            precision = self.cfg.mixed_precision_dtype
            return FrozenReference(TrainedPolicy(frozen, packed=self.cfg.packed, mixed_precision_dtype=precision))
        if plain_model(self.model) is not self.model:
            return AdapterOff(self.policy)
        raise ConfigError(
            f"{self.algo.name} compares with a frozen reference; give Trainer(reference=model), or train a LoRA adapter, whose "
            "base model is the reference."
        )

    def _make_value_head(self) -> ValueHead | None:
        if not self.algo.loss.needs_values:
            return None
        if self.algo.advantages is None:
            raise ConfigError(
                f"{self.algo.name} trains a critic, but does not say how to use it; set advantages=TokenGAE(…)."
            )
        weight = self.policy.head.weight_VD
        return ValueHead(weight.shape[1]).to(weight.device)

    def initialize_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over everything trainable; override for another."""
        parameters = self._trained_parameters()
        if not parameters:
            raise ConfigError("The model has no parameter that requires a gradient.")
        on_gpu = parameters[0].is_cuda
        kind = FullPrecisionAdamW if is_narrow(parameters) else torch.optim.AdamW
        return kind(
            parameters,
            lr=self.cfg.lr,
            betas=self.cfg.betas,
            eps=self.cfg.eps,
            weight_decay=self.cfg.weight_decay,
            fused=on_gpu,
            foreach=not on_gpu,
        )

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        critic = [] if self.value_head is None else list(self.value_head.parameters())
        return [p for p in self.model.parameters() if p.requires_grad] + critic

    # --- the loop ---

    async def train(self, num_steps: int | None = None) -> dict[str, float]:
        """`num_steps` more steps, or until the source has no more; the last step's numbers come back."""
        stats: dict[str, float] = {}
        self.stop = StopSignal()
        end = None if num_steps is None else self.step + num_steps
        try:
            with self.stop.listening():
                if self.cfg.eval_at_start and self.step == 0:
                    await self._evaluate()
                while (end is None or self.step < end) and not self.stop.is_set:
                    try:
                        stats = await self._step()
                    except (RequestsExhausted, StopRequested) as reason:
                        logger.info("training ends at step %d: %s", self.step, reason or type(reason).__name__)
                        break
                    self._background.check()
                    if self.cfg.eval_every_n_steps and self.step % self.cfg.eval_every_n_steps == 0:
                        await self._evaluate()  # before saving: which checkpoint is the best hangs on it
                    await self._save_if_due(stats)
                if self.checkpointer is not None and self.step and self._last_saved != self.step:
                    await self._save(stats)  # however it ended, what was learned is kept
                await self._background.finish()
        finally:
            await self._background.abandon()
        return stats

    async def train_step(self) -> dict[str, float]:
        """One batch, one optimizer step."""
        stats = await self._step()
        await self._save_if_due(stats)
        return stats

    async def _step(self) -> dict[str, float]:
        started = time.perf_counter()
        self._untrained_from = self._data_states()
        await asyncio.to_thread(self._restore_servers)
        prepared = await self.stop.unless(self._fetch())
        fetched = time.perf_counter()
        stats = await asyncio.to_thread(self._update, prepared)
        updated = time.perf_counter()
        await asyncio.to_thread(self._publish)
        stats |= {
            "fetch_s": fetched - started,
            "update_s": updated - fetched,
            "publish_s": time.perf_counter() - updated,
        }
        stats["tokens_per_s"] = stats["num_tokens"] / stats["update_s"]
        return await asyncio.to_thread(self._report, stats, started)

    # --- phases ---

    def _restore_servers(self) -> None:
        """A server that was restarted has forgotten the weights; it gets them again before anybody samples from it."""
        if not isinstance(self.publisher, ChecksServers) or self._published is None:
            return
        if not self.publisher.is_current(self._published):
            logger.warning("a server has lost version %d (was it restarted?); publishing again", self._published)
            self._push()

    async def _fetch(self) -> Prepared:
        """The next batch that has anything to train on."""
        left_out: dict[str, float] = {}
        for _ in range(self.cfg.max_empty_batches):
            prepared = self._prepare(await self.batch_source.next_batch())
            if prepared.items:
                return prepared
            left_out = {name: left_out.get(name, 0) + count for name, count in prepared.counts.items()}
            await asyncio.sleep(0)  # an empty source must not keep everybody else from running
        raise NothingToTrainOn(
            f"{self.cfg.max_empty_batches} batches in a row had nothing to train on at step {self.step}; left out: {left_out}. "
            "Are all rewards of each group equal (zero weights), is everything older than max_lag, too long, or filtered?"
        )

    def _prepare(self, batch: SAWBatch) -> Prepared:
        """Leave out what is too old, what the algorithm does not want, and what does not fit."""
        num_received = len(batch.items)
        fresh = [item for item in batch.items if self._is_fresh(item)]
        kept = SAWBatch(items=fresh, meta=dict(batch.meta))
        if self.algo.preprocess is not None and fresh:
            kept = self.algo.preprocess(kept)
        fitted = fit_length(kept.items, self.cfg.max_seq_len, TooLong(self.cfg.too_long))
        items = [item for item in fitted.items if item.num_action_tokens]
        counts = {
            "num_stale": float(num_received - len(fresh)),
            "num_filtered": float(len(fresh) - len(kept.items)),
            "num_too_long": float(fitted.num_dropped),
            "num_cut": float(fitted.num_truncated),
            "num_without_action": float(len(fitted.items) - len(items)),
        }
        return Prepared(items, kept.meta, counts)

    def _is_fresh(self, item: SAWItem) -> bool:
        if self.cfg.max_lag is None or item.oldest_version is None:
            return True
        return self.step - item.oldest_version <= self.cfg.max_lag

    def _update(self, prepared: Prepared) -> dict[str, float]:
        """Gradient and optimizer step."""
        is_first = self.step == 0
        if is_first:
            check_masks(prepared.items, self.tokenizer)
        self.optimizer.zero_grad(set_to_none=True)  # a step that failed half way has left some
        items = self._with_advantages(prepared.items)
        sums = accumulate_gradients(
            self.policy,
            self.algo.loss,
            items,
            micro_token_budget=self.cfg.micro_token_budget,
            pad_token_id=self.cfg.pad_token_id,
            reference=self.reference,
            value_head=self.value_head,
            watch_entropy=self.cfg.watch_entropy,
        )
        norm = self._apply_gradients()
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_trained(self.step, len(prepared.items))
        stats = effective_share(sums.means())
        if is_first:
            check_parity(stats, self.cfg.parity_tolerance)
        lags = [self.step - 1 - item.oldest_version for item in prepared.items if item.oldest_version is not None]
        if lags:
            stats |= {"lag_mean": sum(lags) / len(lags), "lag_max": float(max(lags))}
        return {
            **batch_stats(prepared.items, prepared.meta, self.reducers),
            **prepared.counts,
            **stats,
            "grad_norm": norm,
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def _with_advantages(self, items: list[SAWItem]) -> list[SAWItem]:
        """With a critic: weights from what it expects of these samples now."""
        if self.value_head is None or self.algo.advantages is None:
            return items
        bins = micro_batches(self.policy, items, self.cfg.micro_token_budget)
        values = expected_values(self.policy, self.value_head, bins, self.cfg.pad_token_id)
        return self.algo.advantages.credit(items, [values[id(item)] for item in items])

    def _apply_gradients(self) -> float:
        parameters = self._trained_parameters()
        limit = self.cfg.max_grad_norm if self.cfg.max_grad_norm is not None else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        schedule = self.cfg.lr_schedule
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * (schedule(self.step) if schedule is not None else 1.0)
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"The gradient of step {self.step} is {norm}; the weights were left as they are. Look at the batch's log-probs "
                "and weights, lower lr, or train in fp32."
            )
        with self._while_changing_weights():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._untrained_from = None
        return norm

    def _while_changing_weights(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.publisher, InPlacePublisher):
            return self.publisher.updating(self.step + 1)
        return contextlib.nullcontext()

    def _publish(self) -> None:
        """New weights to whatever serves the policy; an engine that shares them has them already."""
        if self.publisher is not None and not isinstance(self.publisher, InPlacePublisher):
            if not self._syncs_now():
                return
            self._push()
        self._notify_source()

    def _push(self) -> None:
        assert self.publisher is not None, "whoever calls it has one"
        self.publisher.publish(self._served_weights(), version=self.step)
        self._published = self.step

    def _announce_version(self) -> None:
        """An engine that shares the weights may have served another run: its versions begin with ours."""
        if isinstance(self.publisher, InPlacePublisher):
            self.publisher.publish({}, version=self.step)
        self._notify_source()

    def _notify_source(self) -> None:
        if isinstance(self.batch_source, FollowsVersions):  # only now: its next batch is sampled with these
            self.batch_source.notify_version(self.step)

    def _syncs_now(self) -> bool:
        every = self.cfg.sync_every_steps if self.cfg.sync_every_steps is not None else 1
        return bool(every) and self.step % every == 0

    def _served_weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.publisher, AdapterPublisher):
            return {}
        wanted = self.param_filter or (lambda name, weight: True)
        return {name: weight for name, weight in dense_parameters(self.model) if wanted(name, weight)}

    def _report(self, stats: dict[str, float], started: float) -> dict[str, float]:
        """Log what is due; saving comes after: a kill in between loses no line."""
        named = prefixed({**stats, "step": float(self.step)})
        named["perf/step_s"] = time.perf_counter() - started
        if self.step % self.cfg.log_every == 0:
            self._log(self.step, named)
        return named

    def _log(self, step: int, stats: Mapping[str, float]) -> None:
        if self.logger is not None:
            with self._logging:
                self.logger.log(step, stats)

    # --- evaluation, checkpoints ---

    async def eval(self) -> dict[str, float]:
        """The evaluator's metrics of the weights as they are, logged under eval/."""
        self._take_snapshot()
        return await self._eval_of(self.step)

    async def _eval_of(self, step: int) -> dict[str, float]:
        """`step` is the version that the evaluator sees; beside training, ours goes on meanwhile."""
        if self.evaluator is None:
            raise ConfigError("There is no evaluator; give Trainer(evaluator=…).")
        _, metrics = await self.evaluator.eval(
            max_steps=self.cfg.eval_max_steps,
            timeout_s=self.cfg.eval_timeout_s,
            concurrency=self.cfg.eval_concurrency,
        )
        named = {f"eval/{name.removeprefix('eval/')}": value for name, value in metrics.items()}
        named["eval/step"] = float(step)
        self._last_eval = named
        self._log(step, named)
        return named

    def _take_snapshot(self) -> None:
        if isinstance(self.evaluator, TakesSnapshots):
            self.evaluator.take_snapshot(self.step)

    async def _evaluate(self) -> None:
        """Now and here, or beside the steps that follow."""
        if not self.cfg.eval_in_background:
            with contextlib.suppress(StopRequested):  # it can take long, and nothing is lost with it
                await self.stop.unless(self.eval())
            return
        await self._background.finish()
        if not self.stop.is_set:
            self._take_snapshot()
            self._background.start(self.step, self._eval_of(self.step))

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """Everything that a resumed run needs to go on as if nothing had happened."""
        self._write(self._state(), metrics)

    async def _save_if_due(self, stats: Mapping[str, float]) -> None:
        if self.checkpointer is not None and self.checkpointer.should_save(self.step):
            await self._save(stats)

    async def _save(self, stats: Mapping[str, float]) -> None:
        """The state is taken here, in the event loop: whatever generates ahead changes its own here, too."""
        await self._wait_for_judgement()
        is_current = self._last_eval.get("eval/step") == self.step  # an older one says nothing of these weights
        metrics = {**(self._last_eval if is_current else {}), **stats}
        await asyncio.to_thread(self._write, self._state(), metrics)

    async def _wait_for_judgement(self) -> None:
        """Which checkpoint is the best may hang on the evaluation of these weights, which may still be running."""
        assert self.checkpointer is not None, "only called to save"
        metric = self.checkpointer.config.best_metric
        if metric is not None and metric.startswith("eval/") and self._background.is_evaluating(self.step):
            await self._background.finish()

    def _state(self) -> dict[str, Any]:
        """Data as it stood before the first batch that has not been trained on: that one is made again."""
        data = self._untrained_from if self._untrained_from is not None else self._data_states()
        state: dict[str, Any] = {"step": self.step, "rng": rng_state(), **data}
        if self.value_head is not None:
            state["value_head"] = self.value_head.state_dict()
        return state

    def _data_states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._data_parts().items()}

    def _write(self, state: dict[str, Any], metrics: Mapping[str, float] | None) -> None:
        if self.checkpointer is None:
            raise RuntimeError("There is no checkpointer; give Trainer(checkpoint_config=CheckpointConfig(…)).")
        self.checkpointer.save(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            state=state,
            metrics=metrics,
            tokenizer=self.tokenizer,
        )
        self._last_saved = self.step
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_saved(self.step)

    def _resume(self, where: int | str) -> None:
        assert self.checkpointer is not None, "checked before"
        chosen: dict[str, Any] = {}
        if isinstance(where, int) or str(where).isdigit():
            chosen = {"step": int(where)}
        elif where != "latest":
            chosen = {"path": where}
        state = self.checkpointer.load(model=self.model, optimizer=self.optimizer, **chosen)
        self.step = int(state["step"])
        parts = self._data_parts()
        if self.value_head is not None:
            parts["value_head"] = self.value_head
        for name, part in parts.items():
            if name in state:
                part.load_state_dict(state[name])
        if self.publisher is not None and not isinstance(self.publisher, InPlacePublisher):
            self._push()
        self._announce_version()
        if isinstance(self.logger, Resumable):
            self.logger.resume(self.step)
        restore_rng(state["rng"])
        logger.info("resumed at step %d", self.step)

    def _data_parts(self) -> dict[str, Stateful]:
        parts = {"batch_source": self.batch_source, "credit_assigner": self.algo.credit_assigner}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    # --- without asyncio ---

    def train_sync(self, num_steps: int | None = None) -> dict[str, float]:
        return asyncio.run(self.train(num_steps))

    def train_step_sync(self) -> dict[str, float]:
        return asyncio.run(self.train_step())

    def eval_sync(self) -> dict[str, float]:
        return asyncio.run(self.eval())
