"""Several losses at once: on the same tokens (`CompositeLoss`), or each on the samples of one objective (`RoutedLoss`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, Needs, as_loss
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
        names = [term.name for term in terms]
        if not terms or len(set(names)) != len(names):
            raise ConfigError(
                f"{type(self).__name__} has the terms {names}; it needs at least one, and each name once, or statistics would "
                "overwrite each other."
            )
        self.terms = tuple(terms)
        self.needs = Needs.of_parts(term.loss for term in terms)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        total = torch.zeros((), device=tokens.logps.device)
        stats: dict[str, tuple[Tensor, Tensor | float]] = {}
        for term, own in self._parts(tokens):
            loss, of_term = term.loss(own)
            total = total + term.weight * loss
            # A share of the batch's loss: summed over micro-batches and divided by the shares' sum, it is the loss.
            stats[f"{term.name}/loss"] = loss.detach(), own.num_items / max(own.facts.num_items, 1)
            stats |= {f"{term.name}/{name}": value for name, value in of_term.items()}
        return total, stats

    def _parts(self, tokens: ActionTokens) -> Iterator[tuple[LossTerm, ActionTokens]]:
        """Each term with the tokens that it sees."""
        for term in self.terms:
            yield term, tokens


class RoutedLoss(CompositeLoss):
    """Σ weight_k · loss_k(the samples of objective k); each term's statistics under its name.

    A term sees the samples of its objective as if they were a separate batch: what it divides by, and compares with, are their
    facts over all micro-batches and ranks. So the result is the weighted sum of the losses that separate batches would have
    had, however the batch is split, and samples of one objective do not dilute another.
    """

    def __init__(self, terms: Sequence[LossTerm]) -> None:
        super().__init__(terms)
        with_critic = [term.name for term in terms if term.loss.needs.values]
        if with_critic:
            raise ConfigError(
                f"The objectives {with_critic} need a critic, which would estimate samples of all objectives, demonstrations "
                "too. Mix objectives without one (make_grpo, make_reinforce_pp)."
            )

    def _parts(self, tokens: ActionTokens) -> Iterator[tuple[LossTerm, ActionTokens]]:
        terms = {term.name: term for term in self.terms}
        members: dict[str, list[int]] = {}
        for index, name in enumerate(tokens.objectives or (None,) * tokens.num_items):
            if name is None or name not in terms:
                raise ConfigError(
                    f"A sample has the objective {name!r}; this loss has terms for {', '.join(terms)}. Name it in "
                    "SampleOrigin.objective (MixedBatchSource does), or give mix_objectives(default=…)."
                )
            members.setdefault(name, []).append(index)
        for name, own in members.items():
            yield terms[name], tokens.select(own, tokens.facts.by_objective[name])
