"""`TinkerTrainer`: the loop of `Trainer` with the weights at Tinker. Batches go there, log-probs come back.

    policy = TinkerPolicy(TinkerConfig(base_model="Qwen/Qwen3-8B"))
    agents talk to policy.client
    TinkerTrainer(model=policy, algo=…, batch_source=…, cfg=TrainerConfig(…)).train_sync(100)

It takes the same arguments as `Trainer`, less what only a model in this process can have (publisher, reference, ranks).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.training.algorithms import CISPOLoss, MaskedCausalLMCrossEntropyLoss, RLAlgorithm
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.state_files import read_state
from ludic.training.config import TrainerConfig
from ludic.training.learner.batches import RankBatch
from ludic.training.learner.interface import Learner, OnCommitted
from ludic.training.learner.metrics import MetricSums
from ludic.training.learner.packing import action_fields
from ludic.training.learner.publish import is_due
from ludic.training.losses import ActionTokens, BatchFacts, Loss, TokenClippedSurrogateLoss, mismatch_stats
from ludic.training.losses.base import Bound
from ludic.training.losses.corrections import effective_sample_size
from ludic.training.trainer import TrainingLoop
from ludic.types import (
    BatchSource,
    ConfigError,
    Evaluator,
    FloatArray,
    FollowsDrift,
    NotFinite,
    Reducer,
    SAWItem,
    TrainingLogger,
)
from ludic_tinker.policy import BuiltInLoss, TinkerPolicy, Trained, TrainRow

# --- samples as Tinker's training data ---
#
# Tinker's built-in losses are sums over tokens, so a loss's normalisation goes into the advantages. A loss that Tinker does not
# have is computed here from log-probs (`CustomLoss`), which takes one more forward pass at the service.

_CPU = torch.device("cpu")
Reducing = TokenClippedSurrogateLoss | CISPOLoss | MaskedCausalLMCrossEntropyLoss
"""Losses that are a reduction of one term per token."""


def built_in_of(loss: Loss) -> BuiltInLoss | None:
    """The service's equivalent of a loss; None if it has none."""
    if type(loss) is MaskedCausalLMCrossEntropyLoss:
        return BuiltInLoss("cross_entropy")
    if type(loss) is CISPOLoss:
        return BuiltInLoss("cispo", _thresholds(loss.clip_eps_low, loss.clip_eps_high))
    if type(loss) is TokenClippedSurrogateLoss and loss.ratio_clip is None and loss.behavior_cap is None:
        if loss.clip_eps_low >= 1 and loss.clip_eps_high == float("inf"):
            return BuiltInLoss("importance_sampling")  # a ratio is never below 0
        return BuiltInLoss("ppo", _thresholds(loss.clip_eps_low, loss.clip_eps_high))
    return None


def _thresholds(low: Bound, high: Bound) -> dict[str, float]:
    return {"clip_low_threshold": max(0.0, 1 - float(low)), "clip_high_threshold": 1 + float(high)}


def _check_loss(loss: Loss, name: str) -> None:
    """Raise ConfigError if the loss needs more than log-probs of the sampled tokens."""
    needs = {
        "a critic": loss.needs.values,
        "the policy's entropy": loss.needs.entropy,
        "a reference": loss.needs.reference,
        "the old policy's log-probs": loss.needs.proximal,
        "a teacher's whole vocabulary": loss.needs.teacher_kl is not None,
        "log-probs of observations": loss.needs.observations,
        "whole logits": loss.needs.logits,
    }
    missing = [what for what, is_needed in needs.items() if is_needed]
    if missing:
        raise ConfigError(
            f"{name} needs {' and '.join(missing)}, but Tinker gives log-probs of the sampled tokens only. Use an algorithm "
            "without it (make_grpo, make_dr_grpo, make_cispo, make_rloo, make_reinforce, make_sft, …), or train with Trainer."
        )


def _check_items(items: Sequence[SAWItem]) -> None:
    """Raise ConfigError for samples of a distribution that Tinker cannot train."""
    others = sorted({t for item in items if (t := item.attachments.temperature) not in (None, 1.0)})
    if others:
        raise ConfigError(
            f"Samples were drawn at temperature {', '.join(f'{t:g}' for t in others)}, but Tinker trains at 1: ratios would be "
            "wrong. Sample with SamplingParams(temperature=1.0)."
        )
    if any(item.attachments.candidates is not None for item in items):
        raise ConfigError(
            "Samples were drawn from a part of the vocabulary (top_p, top_k or min_p), but Tinker trains on all of it: ratios "
            "would be wrong. Sample without truncation."
        )


def rows_of(items: Sequence[SAWItem], loss: Loss, facts: BatchFacts) -> list[TrainRow]:
    """One row per sample."""
    built_in = built_in_of(loss)
    inputs = [{} for _ in items] if built_in is None else _loss_inputs(items, loss, built_in, facts)
    return [TrainRow(item.input_ids[:-1], item.input_ids[1:], own) for item, own in zip(items, inputs, strict=True)]


def _loss_inputs(
    items: Sequence[SAWItem], loss: Loss, built_in: BuiltInLoss, facts: BatchFacts
) -> list[dict[str, FloatArray]]:
    assert isinstance(loss, Reducing), "the others are not built in"
    # Log-probs are not known yet, and a reduction does not read them.
    tokens = _tokens_of(items, [torch.zeros(len(item.input_ids) - 1) for item in items], facts)
    weights = (tokens.weights * _scale(loss, tokens)).numpy()
    if built_in.name == "cross_entropy":
        return [{"weights": own} for own in _at_targets(items, weights)]
    old = tokens.require_old_logps(type(loss).__name__).numpy()
    pairs = zip(_at_targets(items, old), _at_targets(items, weights), strict=True)
    return [{"logprobs": logprobs, "advantages": advantages} for logprobs, advantages in pairs]


def _scale(loss: Reducing, tokens: ActionTokens) -> Tensor:
    """[A] factor of each token's term in the batch's loss: the gradient of the reduction, which is linear."""
    terms = torch.ones_like(tokens.weights).requires_grad_()
    (scale,) = torch.autograd.grad(tokens.reduce_tokens(terms, loss.reduction), terms)
    return scale


def _at_targets(items: Sequence[SAWItem], values_A: np.ndarray) -> list[FloatArray]:
    """One value per target of each row: the action tokens' values, and zero elsewhere."""
    ends = np.cumsum([0, *(item.num_action_tokens for item in items)])
    spread = []
    for item, (start, end) in zip(items, pairwise(ends), strict=True):
        row = np.zeros(len(item.input_ids) - 1, dtype=np.float32)
        row[item.action_mask[1:]] = values_A[start:end]
        spread.append(row)
    return spread


def _tokens_of(items: Sequence[SAWItem], logprobs: Sequence[Tensor], facts: BatchFacts) -> ActionTokens:
    """The action tokens that a loss reads, from the log-probs of every row's targets."""
    starts = np.cumsum([0, *(len(item.input_ids) - 1 for item in items)])[:-1]
    paths = [np.arange(start, start + len(item.input_ids)) for start, item in zip(starts, items, strict=True)]
    actions = action_fields(items, paths, _CPU)
    return ActionTokens(
        logps=torch.cat(list(logprobs)).index_select(0, actions.predictor_A),
        weights=actions.weight_A,
        item_index=actions.item_A,
        num_items=actions.num_items,
        facts=facts,
        old_logps=actions.old_logp_A,
        objectives=actions.objectives,
        episodes=actions.episodes,
        without_old_logps=actions.without_old_logps,
    )


logger = logging.getLogger(__name__)

# Checkpoints of a policy that is trained elsewhere: its weights stay there, and a folder here says where, and all the rest.
#     output_dir/step_000100/   trainer_state.json (with the tinker:// path), ranks/, manifest.json
#
# The folder is written after the service has saved, so one that is there can be resumed from. Removing a folder removes
# nothing at the service.


class _RemoteCheckpoints(CheckpointManager):
    """The same folders, pointers and pruning, without weights."""

    def save_path(self, step: int, path: str, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Note that `path` holds the weights and the optimizer of this step."""
        try:
            return self.save(step, model=torch.nn.Module(), state={**state, "remote_path": path}, metrics=metrics)
        except CheckpointError as error:
            raise CheckpointError(f"{error} The weights are safe at {path}.") from error

    def _write_model(self, model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
        return {}

    def read_path(self, *, step: int | None = None, path: str | None = None) -> tuple[str, dict[str, Any]]:
        """(the path of the weights, the rest of the state) of a step, of a folder, or of the newest checkpoint."""
        folder = self.find(step=step, path=path)
        state = read_state(folder)
        if "remote_path" not in state:
            raise CheckpointError(f"{folder} holds a model, and no path at Tinker. Resume it with Trainer.")
        return state.pop("remote_path"), state


# One optimizer step at Tinker, and the same statistics of it that a local step reports.


_LOSS_TOLERANCE = 1e-2
"""Share of the loss by which the service's own may differ from what its log-probs give, before a warning says so."""


class TinkerLearner(Learner):
    """A policy that the service trains, serves and saves."""

    checkpointer: _RemoteCheckpoints | None

    def __init__(
        self, policy: TinkerPolicy, algo: RLAlgorithm, cfg: TrainerConfig, checkpoint_config: CheckpointConfig | None
    ) -> None:
        _check_loss(algo.loss, algo.name)
        _check_settings(cfg, algo)
        self.policy, self.algo, self.cfg, self.tokenizer = policy, algo, cfg, policy.tokenizer
        self.checkpointer = None if checkpoint_config is None else _RemoteCheckpoints(checkpoint_config)

    def begin(self, step: int, *, is_resumed: bool) -> None:
        if is_resumed:
            self.policy.publish(step)

    def update(self, step: int, batch: RankBatch, on_step: Callable[[], None]) -> dict[str, float]:
        """One step at the service. The loss's metrics are computed here, from the log-probs that the service used."""
        loss, items, facts = self.algo.loss, batch.items, batch.facts
        _check_items(items)
        built_in, adam = built_in_of(loss), _adam_settings(self.cfg, step)

        def value_of(logprobs: Sequence[Tensor]) -> Tensor:
            return loss(_tokens_of(items, logprobs, facts))[0]

        rows = rows_of(items, loss, facts)
        trained = self.policy.train(rows, built_in if built_in is not None else value_of, adam)
        stats = _stats(loss, items, trained, facts)
        _check(stats, trained)
        on_step()
        if (norm := trained.metrics.get("unclipped_grad_l2:mean")) is not None:
            stats["grad_clipped"] = float(0.0 < adam["grad_clip_norm"] < norm)
        named = {_plain(name): value for name, value in trained.metrics.items()}
        return {**stats, **named, "lr": adam["learning_rate"]}

    def publish(self, step: int, since: int) -> bool:
        if not is_due(self.cfg.sync_every_steps, step, since):
            return False
        self.policy.publish(step)
        return True

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], on_committed: OnCommitted
    ) -> None:
        assert self.checkpointer is not None, "the trainer saves only with a checkpointer"
        path = self.policy.save_state(f"step_{step:06d}")
        on_committed(self.checkpointer.save_path(step, path, state, metrics))

    def load(self, *, step: int | None = None, path: str | None = None) -> dict[str, Any]:
        assert self.checkpointer is not None, "the trainer resumes only with a checkpointer"
        remote_path, state = self.checkpointer.read_path(step=step, path=path)
        self.policy.load_state(remote_path)
        return state


def _adam_settings(cfg: TrainerConfig, step: int) -> dict[str, float]:
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
    tokens: ActionTokens = _tokens_of(items, [torch.tensor(own) for own in trained.logprobs], facts)
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


def _check_settings(cfg: TrainerConfig, algo: RLAlgorithm) -> None:
    """Raise ConfigError for settings that a model elsewhere cannot have."""
    asked = {
        "compile": cfg.compile,
        "gradient_checkpointing": cfg.gradient_checkpointing,
        "offload_activations": cfg.offload_activations,
        "optimizer": cfg.optimizer != "adamw",
        "context_parallel": cfg.context_parallel > 1,
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


class TinkerTrainer(TrainingLoop):
    """Trains a policy that is at Tinker."""

    learner: TinkerLearner

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
        self.model = model
        learner = TinkerLearner(model, algo, cfg if cfg is not None else TrainerConfig(), checkpoint_config)
        super().__init__(learner, batch_source, resume_from, train_logger, reducers, evaluator)
