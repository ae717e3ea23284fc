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
        self.teacher_kl = common_distillation(term.loss for term in terms)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        total = torch.zeros((), device=tokens.logps.device)
        stats: dict[str, tuple[Tensor, Tensor | float]] = {}
        share = tokens.num_items / max(tokens.facts.num_items, 1)
        for term in self.terms:
            loss, own = term.loss(tokens)
            total = total + term.weight * loss
            # A share of the batch's loss: summed over micro-batches and divided by the shares' sum, it is the loss.
            stats[f"{term.name}/loss"] = loss.detach(), share
            stats |= {f"{term.name}/{name}": value for name, value in own.items()}
        return total, stats


# Several objectives in one batch: each sample goes to the loss of the objective that it is tagged with.
# A term sees its own samples as if they were a separate batch: what it divides by, and compares with, are the facts of
# all samples of its objective, over all micro-batches and ranks. So the result is the weighted sum of the losses that separate
# batches would have had, however the batch was cut, and adding samples of one objective does not dilute another.


class RoutedLoss(Loss):
    """Σ weight_k · loss_k(the samples of objective k); each term's statistics under its name."""

    def __init__(self, terms: Sequence[LossTerm]) -> None:
        _check(terms)
        self.terms = {term.name: term for term in terms}
        self.needs_entropy = any(term.loss.needs_entropy for term in terms)
        self.needs_reference = any(term.loss.needs_reference for term in terms)
        self.needs_old_logps = any(term.loss.needs_old_logps for term in terms)
        self.needs_logits = any(term.loss.needs_logits for term in terms)
        self.teacher_kl = common_distillation(term.loss for term in terms)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        total = torch.zeros((), device=tokens.logps.device)
        stats: dict[str, tuple[Tensor, Tensor | float]] = {}
        for name, members in self._members(tokens).items():
            term, facts = self.terms[name], tokens.facts.by_objective[name]
            loss, own = term.loss(tokens.select(members, facts))
            total = total + term.weight * loss
            # A share of the objective's loss: summed over micro-batches and divided by the shares' sum, it is the loss.
            stats[f"{name}/loss"] = loss.detach(), len(members) / facts.num_items
            stats |= {f"{name}/{stat}": value for stat, value in own.items()}
        return total, stats

    def _members(self, tokens: ActionTokens) -> dict[str, list[int]]:
        """Objective → its samples of this micro-batch."""
        members: dict[str, list[int]] = {}
        for index, name in enumerate(tokens.objectives or (None,) * tokens.num_items):
            if name is None or name not in self.terms:
                raise ConfigError(
                    f"A sample has the objective {name!r}; this loss has terms for {', '.join(self.terms)}. Name it in "
                    "SampleOrigin.objective (MixedBatchSource does), or give mix_objectives(default=…)."
                )
            members.setdefault(name, []).append(index)
        return members


def _check(terms: Sequence[LossTerm]) -> None:
    names = [term.name for term in terms]
    if not terms or len(set(names)) != len(names):
        raise ConfigError(f"RoutedLoss has the terms {names}; it needs one at least, and each name once.")
    with_critic = [term.name for term in terms if term.loss.needs_values]
    if with_critic:
        raise ConfigError(
            f"The objectives {with_critic} need a critic, which would estimate samples of all objectives, demonstrations "
            "too. Mix objectives without one (make_grpo, make_reinforce_pp)."
        )
