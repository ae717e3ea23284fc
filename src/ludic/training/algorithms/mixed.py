"""Several algorithms on one batch, each on the samples of one objective: RL, imitation, distillation.

A sample's objective decides its credit rule, its preprocessing and its loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ludic.training.algorithms.algorithm import Preprocess, RLAlgorithm
from ludic.training.credit_assignment import RoutedCredit
from ludic.training.losses import LossTerm, RoutedLoss
from ludic.types import ConfigError, SAWBatch, SAWItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One objective of a batch."""

    algorithm: RLAlgorithm
    """Its credit rule, preprocessing and loss."""
    weight: float = 1.0
    """Factor of its loss; 1 is what it would be if the batch held its samples only."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ConfigError(f"Objective.weight={self.weight}; it must be 0 or more, or training would undo it.")
        if self.algorithm.advantages is not None:
            raise ConfigError(
                f"{self.algorithm.name} has a critic, which would estimate samples of the other objectives, too. Mix "
                "algorithms without one (make_grpo, make_reinforce_pp)."
            )


def mix_objectives(
    objectives: Mapping[str, Objective], *, default: str | None = None, name: str = "mixed"
) -> RLAlgorithm:
    """Σ weight · loss, each over the samples of that objective; `default` is the objective of samples that name none."""
    credit = RoutedCredit({key: part.algorithm.credit_assigner for key, part in objectives.items()}, default=default)
    terms = [LossTerm(name=key, loss=part.algorithm.loss, weight=part.weight) for key, part in objectives.items()]
    return RLAlgorithm(
        name=name,
        credit_assigner=credit,
        loss=RoutedLoss(terms),
        preprocess=_routed({key: part.algorithm for key, part in objectives.items()}, default),
        needs_teacher_logps=any(part.algorithm.needs_teacher_logps for part in objectives.values()),
        needs_message_spans=any(part.algorithm.needs_message_spans for part in objectives.values()),
    )


def _routed(algorithms: Mapping[str, RLAlgorithm], default: str | None) -> Preprocess:
    """Each algorithm's preprocessing on its samples; what it adds to the batch's meta goes under the objective's name."""

    def preprocess(batch: SAWBatch) -> SAWBatch:
        members = _members(batch, algorithms, default)
        items: list[SAWItem] = []
        meta: dict[str, Any] = dict(batch.meta)
        for name, own in members.items():
            kept = _prepared(SAWBatch(items=own, meta=dict(batch.meta)), algorithms[name])
            items += kept.items
            news = {key: value for key, value in kept.meta.items() if key not in batch.meta}
            meta |= {f"{name}/{key}": value for key, value in {**news, "num_samples": len(kept.items)}.items()}
        return SAWBatch(items=items, meta=meta)

    return preprocess


def _members(batch: SAWBatch, algorithms: Mapping[str, RLAlgorithm], default: str | None) -> dict[str, list[SAWItem]]:
    members: dict[str, list[SAWItem]] = {}
    for item in batch.items:
        name = item.origin.objective or default
        if name is None or name not in algorithms:
            raise ConfigError(
                f"A sample has the objective {name!r} (rollout {item.origin.rollout_id}); there are "
                f"{', '.join(algorithms)}. Name it in SampleOrigin.objective (MixedBatchSource does), or give default=…."
            )
        members.setdefault(name, []).append(item.with_origin(objective=name))
    return members


def _prepared(batch: SAWBatch, algorithm: RLAlgorithm) -> SAWBatch:
    kept = batch if algorithm.preprocess is None else algorithm.preprocess(batch)
    if algorithm.loss.needs.old_logps:
        return kept
    # Who sampled a demonstration does not matter: its log-probs would count as a mismatch of sampler and trainer.
    items = [replace(item, attachments=replace(item.attachments, actor_logps=None)) for item in kept.items]
    return SAWBatch(items=items, meta=kept.meta)
