"""`Trainer`: batches in, weights out. It never hears of episodes.

With several ranks (ludic.distributed.ranks) each runs the same loop on its share of every batch; the first one fetches,
publishes, evaluates and reports.

One step reads as its phases: fetch a batch, keep what can be trained on, accumulate its gradient, step, publish, report.
The heavy part runs in a thread, so that whatever generates the next batch goes on meanwhile.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ludic.distributed.fsdp import clip_gradients, is_sharded, settings_of
from ludic.distributed.ranks import OneProcess, RankFailed, Ranks, check_together
from ludic.distributed.tensor_parallel import is_tensor_parallel
from ludic.models.execution import compile_layers, recompute_activations
from ludic.models.finite import FiniteCheck
from ludic.models.head import plain_model
from ludic.models.loading import LoadedModel
from ludic.training.algorithms import RLAlgorithm
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.checkpoint.sharded import ShardedCheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.critic.train import (
    explained_variance,
    give_own_rate,
    make_critic,
    saved_critic,
    value_moments,
    with_advantages,
)
from ludic.training.frozen_teacher import frozen_teacher
from ludic.training.guards import check_model, check_parity, require_finite
from ludic.training.learner.checks import GivenParts, check_parts
from ludic.training.learner.evaluation import Evaluation
from ludic.training.learner.gradients import (
    AdapterOff,
    FrozenReference,
    Reference,
    accumulate_gradients,
    batch_facts,
    equal_micro_batches,
)
from ludic.training.learner.metrics import DriftProbe, MetricSums, merge, prefixed
from ludic.training.learner.optimizer import FullPrecisionAdamW, LocalAdamW, is_narrow
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.learner.prepare import data_states, describe, fetch, load_data_states
from ludic.training.learner.publish import WeightUpdates
from ludic.training.learner.rank_batches import PreparedBatch, RankBatch, RankStop, StopKind, scatter_batch
from ludic.training.learner.rank_setup import RankSettings, check_ranks_agree
from ludic.training.learner.rng import restore_rng, rng_state
from ludic.training.learner.stop import StopRequested, StopSignal, run_sync
from ludic.training.loggers import Resumable
from ludic.training.losses import BatchFacts
from ludic.training.losses.corrections import effective_sample_size
from ludic.training.sample_check import TrainableSamples
from ludic.types import (
    AccountsForItems,
    BatchSource,
    ChecksSamples,
    ConfigError,
    Evaluator,
    FollowsDrift,
    FollowsVersions,
    PolicyPublisher,
    Reducer,
    RequestsExhausted,
    SAWItem,
    TrainingLogger,
)

logger = logging.getLogger(__name__)


T = TypeVar("T")

_SUSPECTS = "num_weights_not_finite"


class Trainer:
    """The loop of one policy."""

    def __init__(
        self,
        *,
        model: Any,
        algo: RLAlgorithm,
        batch_source: BatchSource | None,
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
        critic: Any = None,
        teacher: LoadedModel | None = None,
        tokenizer: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        """With several `ranks` the model is sharded (shard_model); a source on the first rank alone feeds all of them, the
        others are given None. Publisher, logger and evaluator are only used on the first. `teacher` is for losses that compare
        whole distributions (`make_opd(kl="reverse")`), `critic` for critics with a model of their own
        (`make_ppo(critic="separate")`)."""
        self.cfg = cfg if cfg is not None else TrainerConfig()
        self.ranks: Ranks = ranks if ranks is not None else OneProcess()
        self.model, self.algo, self.batch_source = model, algo, batch_source
        self.logger, self.reducers, self.tokenizer = train_logger, reducers, tokenizer
        saved_how = checkpointer.config if checkpointer is not None else checkpoint_config
        self._is_spread = is_sharded(model) or is_tensor_parallel(model)
        """Whether each rank has only a part of the weights."""
        self.roles = check_ranks_agree(
            self.ranks, RankSettings(self.cfg, algo, model, saved_how, publisher, batch_source)
        )
        self.checkpointer = checkpointer or self._make_checkpointer(checkpoint_config)
        given = GivenParts(
            cfg=self.cfg,
            model=model,
            is_spread=self._is_spread,
            is_first=self.ranks.is_first,
            publisher=publisher,
            param_filter=param_filter,
            checkpointer=self.checkpointer,
            resume_from=resume_from,
            evaluator=evaluator,
        )
        check_together(self.ranks, lambda: check_parts(given))
        recomputes = enable_gradient_checkpointing or self.cfg.gradient_checkpointing
        self._prepare_model(recomputes)
        self.policy = TrainedPolicy(model, packed=self.cfg.packed, mixed_precision_dtype=self.cfg.mixed_precision_dtype)
        self._compile_if_asked()  # after the policy has looked at the layers
        self.reference = self._make_reference(reference)
        self.teacher = frozen_teacher(
            teacher, algo, self.policy, self.cfg, tokenizer=tokenizer, is_spread=self._is_spread
        )
        self.critic = make_critic(critic, algo, self.policy, self.cfg, is_spread=self._is_spread, recomputes=recomputes)
        self.optimizer = self.initialize_optimizer()
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0
        """Optimizer steps done; also the version of the policy."""
        self._evaluation = Evaluation(evaluator, self.cfg, self._log)
        self._publishing = WeightUpdates(
            model,
            publisher,
            ranks=self.ranks,
            roles=self.roles,
            is_spread=self._is_spread,
            param_filter=param_filter,
            every=self.cfg.sync_every_steps,
        )
        self._logging = threading.Lock()
        """A step is reported from a thread, an evaluation beside it from the event loop; loggers see one at a time."""
        self._last_saved: int | None = None
        self._untrained_from: dict[str, Any] | None = None
        """Where data stood before the batch that is being fetched or trained on; None between steps."""
        self._num_brought = 0
        """How many samples of the batch that is being trained on came from our own source."""
        self.stop = StopSignal()
        torch.manual_seed(self.cfg.seed + self.ranks.rank % self.roles.num_shares)
        check_model(model)
        if isinstance(batch_source, ChecksSamples):
            batch_source.use_sample_check(TrainableSamples(algo, self.cfg, model, reducers))
        self._frozen = {"reference": reference, "teacher": None if teacher is None else teacher.model}
        if resume_from is not None:
            self._resume(resume_from)
        else:
            self._check_loaded()
            self._publishing.begin(self.step, is_resumed=False)
            self._notify_source()

    @property
    def current_step(self) -> int:
        return self.step

    @property
    def publisher(self) -> PolicyPublisher | None:
        """As it was given; another one needs another trainer."""
        return self._publishing.publisher

    @property
    def evaluator(self) -> Evaluator | None:
        """As it was given; another one needs another trainer."""
        return self._evaluation.evaluator

    # --- making ---

    def _make_checkpointer(self, config: CheckpointConfig | None) -> CheckpointManager | None:
        if config is None:
            return None
        if not self._is_spread:
            return CheckpointManager(config)
        per_rank = ("rng", "batch_source", "credit_assigner") if self.roles.has_source_per_rank else ("rng",)
        return ShardedCheckpointManager(config, per_rank=per_rank)

    def _prepare_model(self, with_checkpointing: bool) -> None:
        if self.cfg.model_device is not None and not self._is_spread:
            self.model.to(self.cfg.model_device)
        self.model.train()
        if with_checkpointing:
            recompute_activations(self.model)

    def _compile_if_asked(self) -> None:
        if self.cfg.compile or (is_sharded(self.model) and settings_of(self.model).compile):
            compile_layers(self.model)

    def _make_reference(self, reference: Any) -> Reference | None:
        if not self.algo.loss.needs_reference:
            return None
        if reference is not None:
            placed = reference if is_sharded(reference) else reference.to(self.policy.device)
            frozen = placed.eval().requires_grad_(False)
            precision = self.cfg.mixed_precision_dtype
            return FrozenReference(TrainedPolicy(frozen, packed=self.cfg.packed, mixed_precision_dtype=precision))
        if plain_model(self.model) is not self.model:
            return AdapterOff(self.policy)
        raise ConfigError(
            f"{self.algo.name} compares with a frozen reference; give Trainer(reference=model), or train a LoRA adapter, whose "
            "base model is the reference."
        )

    def initialize_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over everything trainable; override for another."""
        parameters = self._trained_parameters()
        if not parameters:
            raise ConfigError("The model has no parameter that requires a gradient.")
        on_gpu = parameters[0].is_cuda
        kind = FullPrecisionAdamW if is_narrow(parameters) else LocalAdamW
        optimizer = kind(
            parameters,
            lr=self.cfg.lr,
            betas=self.cfg.betas,
            eps=self.cfg.eps,
            weight_decay=self.cfg.weight_decay,
            fused=on_gpu,
            foreach=not on_gpu,
        )
        if self.cfg.critic_lr is not None:
            give_own_rate(optimizer, len(parameters) - len(self._critic_parameters()), self.cfg.critic_lr)
        return optimizer

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        return [*self._policy_parameters(), *self._critic_parameters()]

    def _policy_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _named_trained(self) -> list[tuple[str, torch.Tensor]]:
        own = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return own + [(f"critic[{number}]", weight) for number, weight in enumerate(self._critic_parameters())]

    def _critic_parameters(self) -> list[torch.nn.Parameter]:
        return [] if self.critic is None else self.critic.parameters()

    # --- the loop ---

    async def train(self, num_steps: int | None = None) -> dict[str, float]:
        """`num_steps` more steps, or until the source has no more; the last step's numbers come back."""
        stats: dict[str, float] = {}
        self.stop = StopSignal()
        end = None if num_steps is None else self.step + num_steps
        try:
            with self.stop.listening(), self.ranks.watching():
                if self.cfg.eval_at_start and self.step == 0:
                    await self._evaluate()
                while (end is None or self.step < end) and not self._stops_here():
                    try:
                        stats = await self._step()
                    except (RequestsExhausted, StopRequested) as reason:
                        logger.info("training ends at step %d: %s", self.step, reason or type(reason).__name__)
                        break
                    self._evaluation.background.check()
                    if self._evaluation.is_due(self.step):
                        await self._evaluate()  # before saving: which checkpoint is the best hangs on it
                    await self._save_if_due(stats)
                if self.checkpointer is not None and self.step and self._last_saved != self.step:
                    await self._save(stats)  # however it ended, what was learned is kept
                if self.checkpointer is not None:
                    await self._in_thread(self.checkpointer.finish)
                await self._evaluation.background.finish()
        finally:
            await self._evaluation.background.abandon()
        return stats

    async def train_step(self) -> dict[str, float]:
        """One batch, one optimizer step."""
        with self.ranks.watching():
            stats = await self._step()
            await self._save_if_due(stats)
        return stats

    def _stops_here(self) -> bool:
        """Several ranks tell each other of a wish to stop where they deal out the next batch, and stop together."""
        return self.stop.is_set and self.ranks.world_size == 1

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Beside the event loop. A thread has to be told which GPU is its process's."""

        def on_device() -> T:
            if self.policy.device.type == "cuda":
                torch.cuda.set_device(self.policy.device)
            return work(*args)

        return await asyncio.to_thread(on_device)

    async def _step(self) -> dict[str, float]:
        started = time.perf_counter()
        self._untrained_from = data_states(self.algo, self.batch_source)
        await self._in_thread(self._publishing.restore_servers, self.step)
        share = await self._next_share()
        fetched = time.perf_counter()
        stats = await self._in_thread(self._update, share)
        updated = time.perf_counter()
        await self._in_thread(self._publish)
        stats |= {
            "fetch_s": fetched - started,
            "update_s": updated - fetched,
            "publish_s": time.perf_counter() - updated,
        }
        stats["tokens_per_s"] = stats["num_tokens"] / stats["update_s"]
        return await self._in_thread(self._report, stats, started)

    # --- phases ---

    async def _next_share(self) -> RankBatch:
        """This rank's part of the next batch; all of it where there is only one."""
        if self.ranks.world_size == 1:
            whole = await self.stop.unless(self._fetch())
            self._num_brought = len(whole.items)
            return await self._in_thread(self._all_of, whole)
        try:
            own: PreparedBatch | Exception = await self._own_batch()
        except Exception as error:  # noqa: BLE001 - the others must hear of it before it is raised
            own = error
        self._num_brought = len(own.items) if isinstance(own, PreparedBatch) else 0
        report = own if isinstance(own, PreparedBatch) else RankStop.of(own)
        try:
            return await self._in_thread(scatter_batch, self.ranks, report, self._described, self.roles.num_shares)
        except RankFailed:
            if isinstance(own, Exception) and RankStop.of(own).kind is StopKind.FAILED:
                raise own from None  # the others say whose error it was; here it is raised as it is
            raise

    async def _own_batch(self) -> PreparedBatch:
        """What this rank brings to a batch of all: nothing, if only the first has a source."""
        if self.stop.is_set:
            raise StopRequested(self.stop.reason or "")
        return PreparedBatch([]) if self.batch_source is None else await self.stop.unless(self._fetch())

    def _all_of(self, whole: PreparedBatch) -> RankBatch:
        return RankBatch(whole.items, batch_facts(whole.items), self._described(whole))

    async def _fetch(self) -> PreparedBatch:
        assert self.batch_source is not None, "checked before"
        return await fetch(self.batch_source, self.algo, self.cfg, self.step)

    def _described(self, whole: PreparedBatch) -> dict[str, float]:
        return describe(whole, self.step, self.reducers, self.tokenizer)

    def _update(self, share: RankBatch) -> dict[str, float]:
        """Gradient and optimizer step."""
        is_first = self.step == 0
        self.optimizer.zero_grad(set_to_none=True)  # a step that failed half way has left some
        items, facts = self._with_advantages(share)
        probe = self._drift_probe(items)
        sums = accumulate_gradients(
            self.policy,
            self.algo.loss,
            items,
            micro_token_budget=self.cfg.micro_token_budget,
            pad_token_id=self.cfg.pad_token_id,
            reference=self.reference,
            teacher=self.teacher,
            critic=self.critic,
            watch_entropy=self.cfg.watch_entropy,
            facts=facts,
            ranks=self.ranks,
        )
        if self.critic is not None:
            sums.add(value_moments(items))
        norms = self._apply_gradients()
        after = FiniteCheck(self._named_trained())
        sums.add_max({_SUSPECTS: after.num_suspects})  # read below, with everything else
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_trained(self.step, self._num_brought)
        if probe is not None:
            sums.add(probe.measure())
        stats = explained_variance(effective_sample_size(self._over_ranks(sums)))
        if stats.pop(_SUSPECTS):
            self._check_updated(after)
        if isinstance(self.algo.credit_assigner, FollowsDrift):
            self.algo.credit_assigner.notify_drift(stats["policy_drift"])
        if is_first and self.ranks.is_first:
            check_parity(stats, self.cfg.parity_tolerance)
        return {**share.stats, **stats, **norms, "lr": self.optimizer.param_groups[0]["lr"]}

    def _check_loaded(self) -> None:
        """Before the first step: all weights, frozen ones too."""
        others = [(what, model) for what, model in self._frozen.items() if model is not None]
        frozen = [(f"{what}.{name}", p) for what, model in others for name, p in model.named_parameters()]
        check = FiniteCheck([*self.model.named_parameters(), *self._named_trained(), *frozen])
        require_finite(check, self.ranks, "The weights to begin with are not finite", "Load other weights.")

    def _check_updated(self, check: FiniteCheck) -> None:
        saved = None if self.checkpointer is None else self.checkpointer.latest()
        where = "There is no checkpoint: start again" if saved is None else f"Go on from {saved.name}"
        rate = self.optimizer.param_groups[0]["lr"]
        require_finite(
            check,
            self.ranks,
            f"Step {self.step} has made weights that are not finite; they were not saved",
            f"{where}, with a lower lr (now {rate:g}) or in fp32.",
        )

    def _drift_probe(self, items: list[SAWItem]) -> DriftProbe | None:
        """For credit rules that want to know how far an update moves the policy."""
        if not isinstance(self.algo.credit_assigner, FollowsDrift):
            return None
        bins = equal_micro_batches(self.policy, items, self.cfg.micro_token_budget, self.ranks)
        return DriftProbe(self.policy, bins[0], self.cfg.pad_token_id)

    def _over_ranks(self, sums: MetricSums) -> dict[str, float]:
        gathered = self.ranks.gather(sums.totals())
        return self.ranks.broadcast(None if gathered is None else merge(gathered).means())

    def _with_advantages(self, share: RankBatch) -> tuple[list[SAWItem], BatchFacts]:
        """With a critic: weights from what it expects of these samples now."""
        if self.critic is None:
            return share.items, share.facts
        return with_advantages(self.critic, self.algo, self.policy, share, self.cfg, self.ranks)

    def _apply_gradients(self) -> dict[str, float]:
        """One optimizer step; the norms that the gradients had, and whether one was above the limit."""
        limit = self.cfg.max_grad_norm if self.cfg.max_grad_norm is not None else math.inf
        norms = self._clip_gradients(limit)
        schedule = self.cfg.lr_schedule
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * (schedule(self.step) if schedule is not None else 1.0)
        if not all(map(math.isfinite, norms.values())):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"The gradient of step {self.step} is not finite ({norms}); the weights were left as they are. Look at the batch's "
                "log-probs and weights, lower lr, or train in fp32."
            )
        with self._publishing.while_changing_weights(self.step + 1):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._untrained_from = None
        return {**norms, "grad_clipped": float(max(norms.values()) > limit)}

    def _clip_gradients(self, limit: float) -> dict[str, float]:
        """Together; but a critic apart from the policy must not scale the policy's gradient either."""
        if self._is_spread:
            self.ranks.sum_tensors([p.grad for p in self._critic_parameters() if p.grad is not None])
        if self.critic is None or not self.critic.is_apart:
            return {"grad_norm": self._clipped(self._trained_parameters(), limit)}
        return {
            "grad_norm": self._clipped(self._policy_parameters(), limit),
            "critic_grad_norm": self._clipped(self._critic_parameters(), limit),
        }

    def _clipped(self, parameters: list[torch.nn.Parameter], limit: float) -> float:
        if not self._is_spread:
            return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        return clip_gradients([p.grad for p in parameters if p.grad is not None], limit, self.ranks)

    def _publish(self) -> None:
        """New weights to whatever serves the policy."""
        if self._publishing.after_step(self.step):
            self._notify_source()

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
        if self.logger is not None and self.ranks.is_first:
            with self._logging:
                self.logger.log(step, stats)

    # --- evaluation, checkpoints ---

    async def eval(self) -> dict[str, float]:
        """The evaluator's metrics of the weights as they are, logged under eval/."""
        return await self._evaluation.now(self.step)

    async def _evaluate(self) -> None:
        """On the first rank; the others wait, and hear what came of it."""
        if self.ranks.is_first:
            await self._evaluation.run(self.step, self.stop)
        if self.ranks.world_size > 1:
            self._evaluation.last = await self._in_thread(self.ranks.broadcast, self._evaluation.last)

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> None:
        """Everything that a resumed run needs to go on as if nothing had happened."""
        self._write(self._state(), metrics)

    async def _save_if_due(self, stats: Mapping[str, float]) -> None:
        if self.checkpointer is not None and self.checkpointer.should_save(self.step):
            await self._save(stats)

    async def _save(self, stats: Mapping[str, float]) -> None:
        """The state is taken here, in the event loop: whatever generates ahead changes its own here, too."""
        assert self.checkpointer is not None, "only called to save"
        await self._evaluation.wait_for_judgement(self.step, self.checkpointer.config.best_metric)
        metrics = {**self._evaluation.found_of(self.step), **stats}
        await self._in_thread(self._write, self._state(), metrics)

    def _state(self) -> dict[str, Any]:
        """Data as it stood before the first batch that has not been trained on: that one is made again."""
        data = self._untrained_from if self._untrained_from is not None else data_states(self.algo, self.batch_source)
        state: dict[str, Any] = {"step": self.step, "rng": rng_state(), **data}
        if self.critic is not None:
            state["critic"] = self.critic.state_dict()
        return state

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
            on_committed=partial(self._notify_saved, self.step),
        )
        self._last_saved = self.step

    def _notify_saved(self, step: int, folder: Path) -> None:
        """A sharded checkpoint is on disk some time after `save` returned."""
        if isinstance(self.batch_source, AccountsForItems):
            self.batch_source.notify_saved(step)

    def _resume(self, where: int | str) -> None:
        assert self.checkpointer is not None, "checked before"
        chosen: dict[str, Any] = {}
        if isinstance(where, int) or str(where).isdigit():
            chosen = {"step": int(where)}
        elif where != "latest":
            chosen = {"path": where}
        state = self.checkpointer.load(model=self.model, optimizer=self.optimizer, **chosen)
        self.step = int(state["step"])
        if self.critic is not None:
            self.critic.load_state_dict(saved_critic(state, self.algo.name))
        load_data_states(self.algo, self.batch_source, state)
        self._check_loaded()
        self._publishing.begin(self.step, is_resumed=True)
        self._notify_source()
        if isinstance(self.logger, Resumable) and self.ranks.is_first:
            self.logger.resume(self.step)
        restore_rng(state.get("rng", {}))
        logger.info("resumed at step %d", self.step)

    # --- without asyncio ---

    def train_sync(self, num_steps: int | None = None) -> dict[str, float]:
        """`train`, also where an event loop runs already: a notebook."""
        return run_sync(self.train(num_steps), lambda: self.stop)

    def train_step_sync(self) -> dict[str, float]:
        return run_sync(self.train_step())

    def eval_sync(self) -> dict[str, float]:
        return run_sync(self.eval())
