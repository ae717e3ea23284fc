"""Several losses at once, on the same log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, as_loss, common_distillation
from ludic.training.losses.tokens import ActionTokens, Stats
from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerm:
    """One part of a composite."""

    name: str
    loss: Loss
    weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))


class CompositeLoss(Loss):
    """Σ weight_i · loss_i; each term's statistics under its name."""

    def __init__(self, terms: Sequence[LossTerm]) -> None:
        if not terms:
            raise ConfigError("CompositeLoss needs at least one term.")
        names = [term.name for term in terms]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"CompositeLoss has two terms of one name: {names}. Statistics would overwrite each other."
            )
        self.terms = tuple(terms)
        self.needs_entropy = any(term.loss.needs_entropy for term in terms)
        self.needs_reference = any(term.loss.needs_reference for term in terms)
        self.needs_old_logps = any(term.loss.needs_old_logps for term in terms)
        self.needs_values = any(term.loss.needs_values for term in terms)
        self.needs_logits = any(term.loss.needs_logits for term in terms)
        self.distils = common_distillation(term.loss for term in terms)

    def of(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        total = torch.zeros((), device=tokens.logps.device)
        stats: dict[str, tuple[Tensor, Tensor | float]] = {}
        share = tokens.num_items / max(tokens.facts.num_items, 1)
        for term in self.terms:
            loss, own = term.loss.of(tokens)
            total = total + term.weight * loss
            # A share of the batch's loss: summed over micro-batches and divided by the shares' sum, it is the loss.
            stats[f"{term.name}/loss"] = loss.detach(), share
            stats |= {f"{term.name}/{name}": value for name, value in own.items()}
        return total, stats
