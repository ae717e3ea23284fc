"""One optimizer step at Tinker, and the same statistics of it that a local step reports."""

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ludic.distributed.tinker_policy import TinkerPolicy, Trained
from ludic.training.config import TrainerConfig
from ludic.training.losses import ActionTokens, BatchFacts, Loss, mismatch_stats
from ludic.training.losses.mismatch import effective_share
from ludic.training.stats import StatSum
from ludic.training.tinker_data import built_in_of, check_items, rows_of, tokens_of
from ludic.training.update import batch_facts
from ludic.types import NotFinite, SAWItem

logger = logging.getLogger(__name__)

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
        return loss.of(tokens_of(items, logprobs, facts))[0]

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
    value, reported = loss.of(tokens)
    sums = StatSum()
    sums.add({"loss": (value, 1.0), **reported, **mismatch_stats(tokens)})
    return effective_share(sums.means())


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
