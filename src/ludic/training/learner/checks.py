"""Parts that were given to a trainer and do not fit each other are found before the first step, with what to do instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ludic.distributed.publish.in_process import SharedWeightsPublisher
from ludic.training.checkpoint.manager import CheckpointManager
from ludic.training.checkpoint.sharded import ShardedCheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.losses import Loss
from ludic.types import (
    AdapterPublisher,
    ConfigError,
    Evaluator,
    InPlacePublisher,
    PolicyPublisher,
    SAWItem,
    TakesSnapshots,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenParts:
    """What one rank's trainer was made of."""

    cfg: TrainerConfig
    model: Any
    is_spread: bool
    """Whether each rank has only a part of the weights."""
    is_first: bool
    """Whether this rank publishes and evaluates."""
    publisher: PolicyPublisher | None
    param_filter: Callable[[str, torch.Tensor], bool] | None
    checkpointer: CheckpointManager | None
    resume_from: int | str | None
    evaluator: Evaluator | None


def check_parts(parts: GivenParts) -> None:
    """ConfigError for the first thing that cannot work."""
    if isinstance(parts.publisher, InPlacePublisher):
        _check_shared_weights(parts, parts.publisher)
    if isinstance(parts.publisher, AdapterPublisher):
        _check_adapter_alone(parts, parts.publisher)
    if parts.cfg.sync_every_steps and parts.publisher is None and parts.is_first:
        raise ConfigError(f"sync_every_steps={parts.cfg.sync_every_steps}, but there is no publisher to sync through.")
    _check_checkpoints(parts)
    _check_evaluation(parts)


def _check_shared_weights(parts: GivenParts, publisher: InPlacePublisher) -> None:
    if parts.is_spread:
        raise ConfigError(
            f"{type(publisher).__name__} serves the very weights that are trained, but these are spread over ranks. Serve a copy "
            "of the model: with vLLM, or ludic.distributed.ClientPublisher(LocalEngine(copy))."
        )
    if isinstance(publisher, SharedWeightsPublisher):
        publisher.require_shared(parts.model)
    if parts.cfg.sync_every_steps not in (None, 1):
        raise ConfigError(
            f"sync_every_steps={parts.cfg.sync_every_steps}, but {type(publisher).__name__} serves the very weights that are "
            "trained: every step is published. Leave it None."
        )


def _check_adapter_alone(parts: GivenParts, publisher: AdapterPublisher) -> None:
    if parts.is_spread:
        raise ConfigError(
            f"{type(publisher).__name__} reads the adapter from the model, whose weights are spread over ranks. Publish merged "
            "weights: create_vllm_publisher(client)."
        )
    publisher.require_trained(parts.model)
    if parts.param_filter is not None:
        raise ConfigError("param_filter chooses among merged weights, but the publisher sends the adapter alone.")


def _check_checkpoints(parts: GivenParts) -> None:
    manager = parts.checkpointer
    if manager is not None and parts.is_spread != isinstance(manager, ShardedCheckpointManager):
        raise ConfigError(
            f"A {type(manager).__name__} cannot save this model: ShardedCheckpointManager is for sharded ones, and "
            "CheckpointManager for all others. Give Trainer a checkpoint_config; it makes the right one."
        )
    if parts.resume_from is not None and manager is None:
        raise ConfigError(f"resume_from={parts.resume_from!r} needs a checkpointer or a checkpoint_config.")


def _check_evaluation(parts: GivenParts) -> None:
    cfg = parts.cfg
    if (cfg.eval_at_start or cfg.eval_every_n_steps) and parts.evaluator is None and parts.is_first:
        raise ConfigError("eval_at_start or eval_every_n_steps is set, but there is no evaluator.")
    shares_weights = isinstance(parts.publisher, InPlacePublisher)
    if cfg.eval_in_background and shares_weights and not isinstance(parts.evaluator, TakesSnapshots):
        raise ConfigError(
            "eval_in_background=True, but the engine serves the very weights that are trained: they would change in the middle "
            "of an evaluation. Evaluate on a copy: SnapshotEvaluator(evaluator, EngineSnapshot(engine)), whose agents talk to "
            "the snapshot."
        )


# ----------------------------------------------------------------------------------------------------
# Refuses samples whose probabilities the trainer cannot compute as the sampler did: a wrong ratio teaches silently.
# ----------------------------------------------------------------------------------------------------

_FULL = "Turn that off: top_p=1, top_k=0, min_p=0, min_tokens=0, no penalties"


def require_trainable_sampling(items: Sequence[SAWItem], loss: Loss) -> None:
    """ConfigError for the first sample that this loss would compare with something else than what it was drawn from."""
    if not loss.needs_old_logps:
        return
    for item in items:
        attached = item.attachments
        if attached.untrainable_sampling is not None and attached.actor_logps is not None:
            raise ConfigError(
                f"{_name(item)} was sampled with {attached.untrainable_sampling}, and the remaining candidates were not recorded: "
                f"its log-probs are of a distribution that the trainer cannot repeat. {_FULL}. The embedded engine records it "
                "for top_p, top_k and min_p, if log-probs are asked for: ReturnSpec.for_rl()."
            )
        has_candidates = attached.candidates is not None and len(attached.candidates.ids) > 0
        if has_candidates and attached.teacher_logps is not None:
            raise ConfigError(
                f"{_name(item)} was drawn from a part of the vocabulary, but its teacher's log-probs are over all of it; their "
                f"difference means nothing. {_FULL}, no max_think."
            )


def _name(item: SAWItem) -> str:
    return f"A sample (rollout {item.origin.rollout_id})"
