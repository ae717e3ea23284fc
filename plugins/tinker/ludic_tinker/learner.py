"""`TinkerTrainer`: the loop of `Trainer` with the weights at Tinker. Batches go there, log-probs come back.

    policy = TinkerPolicy(TinkerConfig(base_model="Qwen/Qwen3-8B"))
    agents talk to policy.client
    TinkerTrainer(model=policy, algo=…, batch_source=…, cfg=TrainerConfig(…)).train_sync(100)

It takes the same arguments as `Trainer`, less what only a model in this process can have (publisher, reference, ranks).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.training.algorithms import RLAlgorithm
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointError, CheckpointManager
from ludic.training.checkpoint.state_files import read_state
from ludic.training.config import TrainerConfig
from ludic.training.learner.batches import RankBatch
from ludic.training.learner.interface import Learner, OnCommitted
from ludic.training.learner.metrics import MetricSums
from ludic.training.learner.publish import is_due
from ludic.training.losses import ActionTokens, BatchFacts, Loss, mismatch_stats
from ludic.training.losses.corrections import effective_sample_size
from ludic.training.trainer import TrainingLoop
from ludic.types import (
    BatchSource,
    ConfigError,
    Evaluator,
    FollowsDrift,
    NotFinite,
    Reducer,
    SAWItem,
    TrainingLogger,
)
from ludic_tinker.data import built_in_of, check_items, check_loss, rows_of, tokens_of
from ludic_tinker.policy import TinkerPolicy, Trained

logger = logging.getLogger(__name__)

# Checkpoints of a policy that is trained elsewhere: its weights stay there, and a folder here says where, and all the rest.
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

    checkpointer: RemoteCheckpoints | None

    def __init__(
        self, policy: TinkerPolicy, algo: RLAlgorithm, cfg: TrainerConfig, checkpoint_config: CheckpointConfig | None
    ) -> None:
        check_loss(algo.loss, algo.name)
        _check_settings(cfg, algo)
        self.policy, self.algo, self.cfg, self.tokenizer = policy, algo, cfg, policy.tokenizer
        self.checkpointer = None if checkpoint_config is None else RemoteCheckpoints(checkpoint_config)

    def begin(self, step: int, *, is_resumed: bool) -> None:
        if is_resumed:
            self.policy.publish(step)

    def update(self, step: int, batch: RankBatch, on_step: Callable[[], None]) -> dict[str, float]:
        """What the loss reports is computed here, from the log-probs that the service used."""
        loss, items, facts = self.algo.loss, batch.items, batch.facts
        check_items(items)
        built_in, adam = built_in_of(loss), adam_settings(self.cfg, step)

        def value_of(logprobs: Sequence[Tensor]) -> Tensor:
            return loss(tokens_of(items, logprobs, facts))[0]

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
