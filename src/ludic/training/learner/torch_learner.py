"""`TorchLearner`: trains a torch model in this process, or one share of it on each of several ranks.

One update reads as its phases: advantages, gradients, clip, optimizer step, checks. `Trainer` makes it and calls it; the
gradient itself is in gradients.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import torch

from ludic.distributed.fsdp import clip_gradients, is_sharded, settings_of
from ludic.distributed.ranks import RankFailed, Ranks, check_together, require_same
from ludic.models.execution import compile_layers, recompute_activations
from ludic.models.head import is_decoder, plain_model
from ludic.models.kinds import image_processor_of, part, router_modules
from ludic.models.loading import LoadedModel
from ludic.models.weights import FiniteCheck
from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.critic.train import explained_variance, make_critic, value_moments, with_advantages
from ludic.training.guards import check_model, explained_memory, require_finite
from ludic.training.learner.batches import (
    Describe,
    PreparedBatch,
    RankBatch,
    RankStop,
    StopKind,
    collect_items,
    scatter_batch,
    scatter_part,
)
from ludic.training.learner.frozen import make_reference, make_teacher
from ludic.training.learner.gradients import DriftProbe, accumulate_gradients, equal_micro_batches, with_proximal_logps
from ludic.training.learner.interface import Learner, OnCommitted
from ludic.training.learner.metrics import merge
from ludic.training.learner.optimizer import make_adamw
from ludic.training.learner.policy import TrainedPolicy, check_shared_prefixes
from ludic.training.learner.publish import ParamFilter, WeightUpdates
from ludic.training.losses import ForeignLoss
from ludic.training.losses.corrections import effective_sample_size
from ludic.types import ConfigError, FollowsDrift, PolicyPublisher, SAWItem

if TYPE_CHECKING:
    from ludic.training.checkpoint.manager import CheckpointManager
    from ludic.training.learner.token_recorder import TokenRecorder

T = TypeVar("T")

_SUSPECTS = "num_weights_not_finite"


class LearnerParts(TypedDict, total=False):
    """The further arguments of `Trainer` and `TorchLearner`, which most runs leave out."""

    reference: Any
    """The frozen model that a loss compares log-probs with; with an adapter its base is the reference."""
    critic: Any
    """The model of a critic that is a second one (`make_ppo(critic="separate")`)."""
    teacher: LoadedModel | None
    """For losses that compare whole distributions (`make_opd(kl="reverse")`)."""
    tokenizer: Any
    """Saved with checkpoints, and used to show samples."""
    ranks: Ranks | None
    """The processes that train together; default: this one."""
    token_recorder: "TokenRecorder | None"
    """Writes what the loss was given of every token, for `ludic view`; the caller closes it."""


class TorchLearner(Learner):
    """One model with its optimizer, and what its loss compares it with: a reference, a teacher, a critic."""

    optimizer: torch.optim.Optimizer
    """Set by `use_optimizer`, before the first update."""

    def __init__(
        self,
        *,
        model: Any,
        algo: RLAlgorithm,
        cfg: TrainerConfig,
        has_source: bool,
        publisher: PolicyPublisher | None = None,
        param_filter: ParamFilter | None = None,
        checkpointer: "CheckpointManager | None" = None,
        checkpoint_config: CheckpointConfig | None = None,
        **others: Unpack[LearnerParts],
    ) -> None:
        """`has_source`: this rank fetches batches. The rest is as in `Trainer`."""
        ranks, tokenizer = others.get("ranks") or Ranks(), others.get("tokenizer")
        self.model, self.algo, self.cfg, self.ranks, self.tokenizer = model, algo, cfg, ranks, tokenizer
        self.is_first, self.is_alone = ranks.is_first, ranks.world_size == 1
        self.is_spread = is_sharded(model)
        """Each rank has only a part of the weights."""
        saved_how = checkpointer.config if checkpointer is not None else checkpoint_config
        self.plan = _check_ranks_agree(ranks, cfg, algo, model, saved_how, has_source=has_source)
        self.checkpointer = checkpointer or self._make_checkpointer(checkpoint_config)
        self.updates = WeightUpdates(
            model,
            publisher,
            ranks=ranks,
            is_spread=self.is_spread,
            param_filter=param_filter,
            every=cfg.sync_every_steps,
        )
        self.shares_weights = self.updates.shares_weights
        self.check(self._check_parts)

        if cfg.model_device is not None and not self.is_spread:
            model.to(cfg.model_device)
        model.train()
        self.policy = self._make_policy()
        self._is_sharing_checked = not self.policy.share_prefixes
        reference, teacher = others.get("reference"), others.get("teacher")
        self.reference = make_reference(reference, algo, self.policy, cfg, tokenizer=tokenizer)
        self.teacher = make_teacher(teacher, algo, self.policy, cfg, tokenizer=tokenizer, is_spread=self.is_spread)
        self.critic = make_critic(others.get("critic"), algo, self.policy, cfg, is_spread=self.is_spread)
        # Ranks that compute the same samples (context parallel) would write the same record.
        num_alike = ranks.world_size // self.plan.num_shares
        self._recorder = others.get("token_recorder") if ranks.rank % num_alike == 0 else None
        self._frozen = {"reference": reference, "teacher": None if teacher is None else teacher.model}
        torch.manual_seed(cfg.seed + ranks.rank // num_alike)
        check_model(model)

    def _make_policy(self) -> TrainedPolicy:
        model, cfg = self.model, self.cfg
        if cfg.gradient_checkpointing:
            recompute_activations(model)
        context = None
        if cfg.context_parallel > 1:
            context = part("sliced").ContextParallel(cfg.context_parallel, self.ranks)
        policy = TrainedPolicy(
            model,
            packed=cfg.packed,
            share_prefixes=cfg.share_prefixes,
            mixed_precision_dtype=cfg.mixed_precision_dtype,
            offload=cfg.offload_activations,
            images=image_processor_of(self.tokenizer),
            replay_experts=cfg.replay_experts,
            context=context,
        )
        if cfg.balance_experts and policy.routers is None:
            if router_modules(model):
                part("experts")  # names the plug-in that watches them
            raise ConfigError(
                f"balance_experts={cfg.balance_experts}, but {type(plain_model(model)).__name__} is no mixture of experts, or "
                "ranks share its rows (context_parallel)."
            )
        is_compiled = cfg.compile or (is_sharded(model) and settings_of(model).compile)
        if is_compiled and not policy.is_fused:
            compile_layers(model)  # after the policy has looked at the layers
        return policy

    def _make_checkpointer(self, config: CheckpointConfig | None) -> "CheckpointManager | None":
        if config is None:
            return None
        from ludic.training.checkpoint.manager import CheckpointManager  # loaded by runs that save

        if not self.is_spread:
            return CheckpointManager(config)
        per_rank = ("rng", "batch_source", "credit_assigner") if self.plan.has_source_per_rank else ("rng",)
        return CheckpointManager(config, is_sharded=True, per_rank=per_rank)

    def _check_parts(self) -> None:
        self.updates.check()
        manager = self.checkpointer
        if manager is not None and self.is_spread != manager.is_sharded:
            raise ConfigError(
                f"CheckpointManager(is_sharded={manager.is_sharded}) cannot save this model, of which each rank has "
                f"{'a part' if self.is_spread else 'all'}. Give Trainer a checkpoint_config; it makes the right one."
            )

    # --- the optimizer ---

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over everything trainable; the critic's weights are a second group if `critic_lr` is set."""
        return make_adamw(self._policy_parameters(), self._critic_parameters(), self.cfg)

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with this one; the schedule multiplies the learning rate that each of its groups has now."""
        self.optimizer = optimizer
        self._base_rates = [group["lr"] for group in optimizer.param_groups]

    def _policy_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _critic_parameters(self) -> list[torch.nn.Parameter]:
        return [] if self.critic is None else self.critic.parameters()

    def _named_trained(self) -> list[tuple[str, torch.Tensor]]:
        own = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return own + [(f"critic[{number}]", weight) for number, weight in enumerate(self._critic_parameters())]

    # --- over ranks ---

    def check(self, check: Callable[[], None]) -> None:
        check_together(self.ranks, check)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        with self.ranks.watching(), explained_memory(self.cfg):
            yield

    def broadcast(self, value: T) -> T:
        return self.ranks.broadcast(value)

    def share(self, own: PreparedBatch | Exception, describe: Describe) -> RankBatch:
        if self.is_alone:
            return super().share(own, describe)
        report = own if isinstance(own, PreparedBatch) else RankStop.of(own)
        try:
            return scatter_batch(
                self.ranks, report, describe, self.plan.num_shares, share_prefixes=self.policy.share_prefixes
            )
        except RankFailed:
            if isinstance(own, Exception) and RankStop.of(own).kind is StopKind.FAILED:
                raise own from None  # the other ranks name this one; here its own error is raised
            raise

    def collect(self, batch: RankBatch) -> list[SAWItem]:
        return super().collect(batch) if self.is_alone else collect_items(self.ranks, batch, self.plan.num_shares)

    def share_part(self, items: list[SAWItem]) -> RankBatch:
        if self.is_alone:
            return super().share_part(items)
        return scatter_part(self.ranks, items, self.plan.num_shares, share_prefixes=self.policy.share_prefixes)

    def _select_device(self) -> None:
        """torch's current GPU is a setting of the thread, and each call may come from another thread."""
        if self.policy.device.type == "cuda":
            torch.cuda.set_device(self.policy.device)

    # --- one update ---

    def prepare(self, batch: RankBatch) -> RankBatch:
        self._select_device()
        self.optimizer.zero_grad(set_to_none=True)  # a step that failed half way has left some
        items, facts, cfg = batch.items, batch.facts, self.cfg
        if not self._is_sharing_checked:
            self._is_sharing_checked = check_shared_prefixes(self.policy, items, cfg.parity_tolerance, self.ranks)
        if self.critic is not None:  # weights from what it expects of these samples now
            items, facts = with_advantages(self.critic, self.algo, self.policy, batch, cfg, self.ranks)
        if self.algo.loss.needs.proximal and cfg.steps_per_batch > 1:
            budget, pad = cfg.micro_token_budget, cfg.pad_token_id
            items = with_proximal_logps(
                self.policy, items, micro_token_budget=budget, pad_token_id=pad, ranks=self.ranks
            )
        return replace(batch, items=items, facts=facts)

    def update(self, step: int, batch: RankBatch, on_step: Callable[[], None]) -> dict[str, float]:
        self._select_device()
        self.optimizer.zero_grad(set_to_none=True)
        items, facts = batch.items, batch.facts
        probe = self._drift_probe(items)
        record = None if self._recorder is None else self._recorder.start(step + 1)
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
            record=record,
            balance_experts=self.cfg.balance_experts,
        )
        if self.critic is not None:
            sums.add(value_moments(items))
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * (self.cfg.lr_schedule(step) if self.cfg.lr_schedule is not None else 1.0)
        norms = self._clip_gradients(step)
        with self.updates.pause_engine(step + 1):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        on_step()
        after = FiniteCheck(self._named_trained())
        sums.add_max({_SUSPECTS: after.num_suspects})  # read below, with everything else
        if probe is not None:
            sums.add(probe.measure())
        gathered = self.ranks.gather(sums.totals())
        means = self.ranks.broadcast(None if gathered is None else merge(gathered).means())
        if self._recorder is not None and record is not None:  # here the device has finished, so the copy takes no time
            self._recorder.write(step + 1, record, rank=self.ranks.rank)
        stats = explained_variance(effective_sample_size(means))
        if stats.pop(_SUSPECTS):
            self._check_updated(step + 1, after)
        if isinstance(self.algo.credit_assigner, FollowsDrift):
            self.algo.credit_assigner.notify_drift(stats["policy_drift"])
        return {**stats, **norms, "lr": self.optimizer.param_groups[0]["lr"]}

    def _drift_probe(self, items: list[SAWItem]) -> DriftProbe | None:
        """For credit rules that follow how far an update moves the policy."""
        if not isinstance(self.algo.credit_assigner, FollowsDrift):
            return None
        bins = equal_micro_batches(self.policy, items, self.cfg.micro_token_budget, self.ranks)
        return DriftProbe(self.policy, bins[0], self.cfg.pad_token_id)

    def _clip_gradients(self, step: int) -> dict[str, float]:
        """Returns the norms before clipping. The gradient of a critic apart from the policy is clipped separately."""
        limit = self.cfg.max_grad_norm or math.inf
        policy, critic = self._policy_parameters(), self._critic_parameters()
        if self.is_spread:
            self.ranks.sum_tensors([p.grad for p in critic if p.grad is not None])
        if self.critic is None or not self.critic.is_apart:
            norms = {"grad_norm": self._clip([*policy, *critic], limit)}
        else:
            norms = {"grad_norm": self._clip(policy, limit), "critic_grad_norm": self._clip(critic, limit)}
        if not all(map(math.isfinite, norms.values())):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"The gradient of step {step} is not finite ({norms}); the weights were not changed. Look at the batch's "
                "log-probs and weights, lower lr, or train in fp32."
            )
        return {**norms, "grad_clipped": float(max(norms.values()) > limit)}

    def _clip(self, parameters: list[torch.nn.Parameter], limit: float) -> float:
        if not self.is_spread:
            return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        return clip_gradients([p.grad for p in parameters if p.grad is not None], limit, self.ranks)

    def _check_updated(self, step: int, check: FiniteCheck) -> None:
        saved = None if self.checkpointer is None else self.checkpointer.latest()
        where = "There is no checkpoint: start again" if saved is None else f"Go on from {saved.name}"
        rate = self.optimizer.param_groups[0]["lr"]
        require_finite(
            check,
            self.ranks,
            f"Step {step} has made weights that are not finite; they were not saved",
            f"{where}, with a lower lr (now {rate:g}) or in fp32.",
        )

    # --- publishing, checkpoints ---

    def begin(self, step: int, *, is_resumed: bool) -> None:
        others = [(what, model) for what, model in self._frozen.items() if model is not None]
        frozen = [(f"{what}.{name}", p) for what, model in others for name, p in model.named_parameters()]
        check = FiniteCheck([*self.model.named_parameters(), *self._named_trained(), *frozen])
        require_finite(check, self.ranks, "The weights to begin with are not finite", "Load other weights.")
        if self._recorder is not None and self.is_first:
            self._recorder.begin(step)
        self.updates.begin(step, is_resumed=is_resumed)

    def check_servers(self, step: int) -> None:
        self._select_device()
        self.updates.check_servers(step)

    def publish(self, step: int, since: int) -> bool:
        self._select_device()
        return self.updates.after_batch(step, since)

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], on_committed: OnCommitted
    ) -> None:
        assert self.checkpointer is not None, "the trainer saves only with a checkpointer"
        self._select_device()
        self.checkpointer.save(
            step,
            model=self.model,
            optimizer=self.optimizer,
            state=state if self.critic is None else {**state, "critic": self.critic.state_dict()},
            metrics=metrics,
            tokenizer=self.tokenizer,
            on_committed=on_committed,
        )

    def load(self, *, step: int | None = None, path: str | None = None) -> dict[str, Any]:
        assert self.checkpointer is not None, "the trainer resumes only with a checkpointer"
        state = self.checkpointer.load(model=self.model, optimizer=self.optimizer, step=step, path=path)
        if self.critic is not None:
            if "critic" not in state:
                raise ConfigError(
                    f"{self.algo.name} has a critic, but the checkpoint to resume from holds none. Resume with the algorithm that "
                    "it was trained with, or begin a new run from its weights."
                )
            self.critic.load_state_dict(state["critic"])
        return state


# --- before training: all ranks have the same settings ---


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """The same on every rank."""

    has_source_per_rank: bool
    """Every rank of several fetches, and not only the first."""
    num_shares: int
    """Number of shares of a batch: that of ranks, or fewer if neighbours compute the same samples (context parallel)."""


def _check_ranks_agree(
    ranks: Ranks,
    cfg: TrainerConfig,
    algo: RLAlgorithm,
    model: Any,
    checkpoints: CheckpointConfig | None,
    *,
    has_source: bool,
) -> _RankPlan:
    """The plan of each rank; ConfigError on all ranks if they cannot train together."""
    needs, size = algo.loss.needs, cfg.context_parallel
    if size > 1 and (needs.values or needs.logits or needs.teacher_kl or ranks.world_size % size):
        raise ConfigError(
            f"context_parallel={size} with {algo.name} on {ranks.world_size} ranks: it needs torchrun with a multiple of {size} "
            "processes, and works with losses on log-probs: no critic, no teacher over the vocabulary, no loss on whole logits."
        )
    if ranks.world_size > 1 and not is_sharded(model):
        raise ConfigError(
            f"There are {ranks.world_size} ranks, but the model is whole on each of them; their weights would drift apart. "
            "Spread it first: ludic.distributed.fsdp.shard_model(model)."
        )
    if ranks.world_size > 1:
        require_same(ranks, _common_facts(cfg, algo, model, checkpoints))
    sources = ranks.broadcast(ranks.gather(has_source))
    if not (all(sources) or (sources[0] and not any(sources[1:]))):
        raise ConfigError(
            f"Of {len(sources)} ranks, these have a batch source: {[r for r, has in enumerate(sources) if has]}. Give one to "
            "the first rank only (batch_source=None on the others), or to every rank."
        )
    num_shares = ranks.world_size // cfg.context_parallel
    return _RankPlan(has_source_per_rank=len(sources) > 1 and all(sources), num_shares=num_shares)


def _common_facts(
    cfg: TrainerConfig, algo: RLAlgorithm, model: Any, checkpoints: CheckpointConfig | None
) -> dict[str, str]:
    """Everything that must be the same on all ranks, by name."""
    settings: list[Any] = [cfg, *([settings_of(model)] if is_sharded(model) else [])]
    settings += [] if checkpoints is None else [checkpoints]
    facts = {f"{type(s).__name__}.{f.name}": repr(getattr(s, f.name)) for s in settings for f in fields(s)}
    config = plain_model(model).config.to_dict() if is_decoder(model) else {}
    facts |= {f"the model's {name}": repr(value) for name, value in config.items() if name != "_name_or_path"}
    facts["checkpoints"] = "off" if checkpoints is None else "on"
    loss = algo.loss.loss if isinstance(algo.loss, ForeignLoss) else algo.loss
    facts["the algorithm"] = f"{algo.name} with {type(loss).__name__}"
    facts["the trainable parameters"] = str(sum(p.numel() for p in model.parameters() if p.requires_grad))
    return facts
