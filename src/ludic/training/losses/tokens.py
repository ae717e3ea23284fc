"""The input of a loss: one entry per action token, flat, and which sample each belongs to.

A loss never meets a model, a logit or padding. It gets log-probabilities that carry a gradient, and facts about the
whole batch (not only this micro-batch), so that its result can be summed over micro-batches and over ranks: however a
batch is split, the gradient is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ludic.types import ConfigError

Stats: TypeAlias = Mapping[str, tuple[Tensor, Tensor | float]]
"""Name → (sum, count): means are taken over the whole batch, at the end."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by it before the exponential: e^20 is beyond what any clip or correction lets through, and far from
overflow."""


_REDUCTIONS = ("sample_sum", "sample_mean", "episode_mean", "token_mean", "constant")


@dataclass(frozen=True, slots=True)
class Reduction:
    """The divisor of the sum over action tokens.

    sample_sum: samples, so a sample counts as many times as it has tokens.
    sample_mean: each sample's own tokens, then samples, so every sample counts the same.
    episode_mean: the tokens of each episode, then episodes, so an episode counts the same however many samples it became.
    token_mean: all action tokens of the batch, so every token counts the same.
    constant: samples × `constant_length`, as sample_sum on the scale of a mean (Dr. GRPO).
    """

    kind: str
    constant_length: int | None = None

    def __post_init__(self) -> None:
        length = self.constant_length
        if self.kind not in _REDUCTIONS:
            raise ConfigError(f"reduction={self.kind!r}; there are {', '.join(_REDUCTIONS)}.")
        if self.kind == "constant" and (length is None or length < 1):
            raise ConfigError(
                f"reduction='constant' divides by a fixed length; give constant_length (got {length}), for instance max_tokens."
            )
        if self.kind != "constant" and length is not None:
            raise ConfigError(
                f"constant_length={length} is only used by reduction='constant', but the reduction is {self.kind!r}."
            )

    @classmethod
    def of(cls, reduction: "Reduction | str | None", *, length_normalize: bool) -> "Reduction":
        """The reduction that a loss is given, or its name; None is a mean over each sample's tokens or their sum."""
        if isinstance(reduction, Reduction):
            return reduction
        return cls(("sample_mean" if length_normalize else "sample_sum") if reduction is None else reduction)


TOKEN_MEAN = Reduction("token_mean")
SAMPLE_MEAN = Reduction("sample_mean")
EPISODE_MEAN = Reduction("episode_mean")


def of_whole_samples(reduction: Reduction | str, loss: str) -> Reduction:
    """The reduction of a loss with one value per sample, which has no tokens to sum or count."""
    found = Reduction.of(reduction, length_normalize=True)
    if found not in (SAMPLE_MEAN, EPISODE_MEAN):
        raise ConfigError(
            f"{loss}(reduction={found.kind!r}): it has one ratio per sample, so it takes sample_mean or episode_mean only."
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """Numbers of the whole batch, over all micro-batches and ranks."""

    num_items: int
    num_tokens: int
    """Action tokens."""
    weight_mean: float = 0.0
    """Over samples."""
    weight_std: float = 1.0
    """Over samples, of the population; 0 where they differ by no more than rounding."""
    num_observed: int = 0
    """Observation tokens (`SAWItem.observation_mask`)."""
    num_episodes: int = 0
    """Episodes that the samples are parts of; 0 if each sample is one."""
    episode_tokens: Mapping[str, int] = field(default_factory=dict)
    """Action tokens of each episode with a name."""
    by_objective: Mapping[str, "BatchFacts"] = field(default_factory=dict)
    """The same of the samples of each objective, where samples name one."""


# Letters: A action tokens of the micro-batch, B its samples, O its observation tokens.
@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedTokens:
    """The observation tokens of one micro-batch. No policy sampled them, so there are no old log-probs and no weights."""

    logps: Tensor
    """[O] under the policy that is trained, at temperature 1; carries the gradient."""
    item_index: Tensor
    """[O] the sample of the micro-batch that each belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTokens:
    """The action tokens of one micro-batch."""

    logps: Tensor
    """[A] under the policy that is trained; carries the gradient."""
    weights: Tensor
    """[A] from credit assignment."""
    item_index: Tensor
    """[A] the sample of the micro-batch that each belongs to."""
    num_items: int
    facts: BatchFacts
    old_logps: Tensor | None = None
    """[A] under the policy that sampled them."""
    proximal_logps: Tensor | None = None
    """[A] under the weights from before the batch's first update (`Needs.proximal`)."""
    ref_logps: Tensor | None = None
    """[A] under a frozen reference."""
    entropy: Tensor | None = None
    """[A] of the policy's distribution at each token; carries a gradient."""
    teacher_kl: Tensor | None = None
    """[A] KL between the policy and a teacher at each token, over the vocabulary; carries a gradient."""
    values: Tensor | None = None
    """[A] of a value head; carries a gradient."""
    returns: Tensor | None = None
    """[A] targets of the value head."""
    old_values: Tensor | None = None
    """[A] of the value head before the update."""
    correction: Tensor | None = None
    """[A] the product of all off-policy corrections of the weights."""
    objectives: tuple[str | None, ...] = ()
    """[B] the objective of each sample; empty where no sample names one."""
    episodes: tuple[str | None, ...] = ()
    """[B] the episode of each sample; None, or empty: the sample is one by itself."""
    comparisons: tuple[str | None, ...] = ()
    """[B] the comparison of each sample; empty where no sample names one."""
    without_old_logps: tuple[int, ...] = ()
    """Samples whose old_logps are not known, where those of others are."""
    observed: ObservedTokens | None = None
    """For losses that ask for them (`Needs.observations`)."""
    padded: tuple[Tensor, Mapping[str, Tensor]] | None = None
    """Logits [B, L, V] and the tensors of `collate_saw_items`, for losses that ask for them (`Needs.logits`)."""

    def corrected(self, factors: Tensor) -> "ActionTokens":
        """The weights times these factors."""
        correction = factors if self.correction is None else self.correction * factors
        return replace(self, weights=self.weights * factors, correction=correction)

    def center(self, *, scaled: bool = True) -> "ActionTokens":
        """A minus the batch's mean, over its standard deviation where it has one if `scaled`.

        What a correction has masked stays 0: it must not come back as minus the mean.
        """
        shift, spread = self.facts.weight_mean, self.facts.weight_std
        shift_A = shift if self.correction is None else shift * self.correction
        scale = spread + 1e-8 if scaled and spread else 1.0
        return replace(self, weights=(self.weights - shift_A) / scale)

    def require_old_logps(self, who: str) -> Tensor:
        if self.old_logps is None:
            raise KeyError(
                f"{who} needs the log-probs of the policy that sampled the tokens (actor_logps). Sample with "
                "InferenceSpec(return_=ReturnSpec.for_rl())."
            )
        if self.without_old_logps:
            raise KeyError(
                f"{who} needs actor_logps of every sample, but {len(self.without_old_logps)} of {self.num_items} have none. "
                "Where a batch mixes objectives, correct and clip inside the term that has them, not around all."
            )
        return self.old_logps

    def log_ratio(self, who: object) -> Tensor:
        """[A] log of trained over sampled probability, bounded so that its exponential is finite; `who` asks for it."""
        return (self.logps - self.require_old_logps(type(who).__name__)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def proximal_log_ratios(self, who: object) -> tuple[Tensor, Tensor]:
        """[A] log of trained over proximal probability, and without a gradient of proximal over sampled; both bounded."""
        if self.proximal_logps is None:
            raise KeyError(
                f"{type(who).__name__} needs log-probs from before the batch's first update: train with Trainer."
            )
        old = self.require_old_logps(type(who).__name__)
        ratios = self.logps - self.proximal_logps, self.proximal_logps - old
        trained, sampled = (ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) for ratio in ratios)
        return trained, sampled.detach()

    def item_ratio(self, log_ratio_A: Tensor, *, mean: bool) -> Tensor:
        """[B] ratio of each sample's probability, or the geometric mean over its tokens; bounded above."""
        combined_B = self.item_mean(log_ratio_A) if mean else self.item_sum(log_ratio_A)
        return combined_B.clamp(max=MAX_LOG_RATIO).exp()

    def select(self, chosen: Sequence[int], facts: BatchFacts) -> "ActionTokens":
        """Some of its samples, as if they were a separate micro-batch, of a batch with these facts."""
        place_B = self.item_index.new_full((self.num_items,), -1)
        place_B[list(chosen)] = torch.arange(len(chosen), device=place_B.device)
        where_A = (self.spread(place_B) >= 0).nonzero()[:, 0]
        per_token: dict[str, Any] = {
            f.name: value[where_A] for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        part = replace(
            self,
            **per_token,
            num_items=len(chosen),
            facts=facts,
            objectives=tuple(self.objectives[index] for index in chosen) if self.objectives else (),
            episodes=tuple(self.episodes[index] for index in chosen) if self.episodes else (),
            comparisons=tuple(self.comparisons[index] for index in chosen) if self.comparisons else (),
            without_old_logps=tuple(new for new, old in enumerate(chosen) if old in self.without_old_logps),
            observed=self._observed_of(place_B),
            padded=self._rows_of(chosen),
        )
        knows_none = len(part.without_old_logps) == len(chosen)
        return replace(
            part,
            item_index=place_B[per_token["item_index"]],
            old_logps=None if knows_none else part.old_logps,
            without_old_logps=() if knows_none else part.without_old_logps,
        )

    def _observed_of(self, place_B: Tensor) -> ObservedTokens | None:
        if self.observed is None:
            return None
        place_O = place_B[self.observed.item_index]
        return ObservedTokens(logps=self.observed.logps[place_O >= 0], item_index=place_O[place_O >= 0])

    def _rows_of(self, chosen: Sequence[int]) -> tuple[Tensor, Mapping[str, Tensor]] | None:
        if self.padded is None:
            return None
        logits, batch = self.padded
        return logits[list(chosen)], {name: rows[list(chosen)] for name, rows in batch.items()}

    def with_known_old_logps(self) -> "ActionTokens":
        """Only the samples whose old_logps are known; all, where no sample lacks them."""
        if not self.without_old_logps:
            return self
        return self.select([i for i in range(self.num_items) if i not in self.without_old_logps], self.facts)

    def item_sum(self, values_A: Tensor) -> Tensor:
        """[B] sums over each sample's tokens."""
        return values_A.new_zeros(self.num_items).index_add(0, self.item_index, values_A)

    @property
    def lengths(self) -> Tensor:
        """[B] action tokens of each sample; at least 1, so that it can be divided by."""
        return self.item_sum(torch.ones_like(self.logps)).clamp(min=1)

    @property
    def episode_lengths(self) -> Tensor:
        """[B] action tokens of each sample's episode, in the whole batch."""
        own_B = self.lengths
        if not any(self.episodes):
            return own_B
        known = self.facts.episode_tokens
        known_B = own_B.new_tensor([0 if name is None else known[name] for name in self.episodes])
        return torch.where(known_B > 0, known_B, own_B)

    def item_mean(self, values_A: Tensor) -> Tensor:
        return self.item_sum(values_A) / self.lengths

    def spread(self, values_B: Tensor) -> Tensor:
        """[A]: each sample's value at each of its tokens."""
        return values_B.index_select(0, self.item_index)

    @property
    def item_weights(self) -> Tensor:
        """[B]: for losses that look at whole samples."""
        return self.item_mean(self.weights)

    def reduce_tokens(self, values_A: Tensor, reduction: Reduction) -> Tensor:
        """This micro-batch's share of the batch's loss."""
        if reduction.kind == "token_mean":
            return values_A.sum() / max(self.facts.num_tokens, 1)
        if reduction in (SAMPLE_MEAN, EPISODE_MEAN):
            return self.reduce_items(self.item_mean(values_A), reduction)
        total = values_A.sum() / max(self.facts.num_items, 1)
        return total if reduction.constant_length is None else total / reduction.constant_length

    def reduce_items(self, values_B: Tensor, reduction: Reduction = SAMPLE_MEAN) -> Tensor:
        """The same for one value per sample. In an episode's mean, each of its samples counts by its tokens."""
        if reduction == EPISODE_MEAN:
            shares_B = self.lengths / self.episode_lengths
            return (values_B * shares_B).sum() / max(self.facts.num_episodes or self.facts.num_items, 1)
        return values_B.sum() / max(self.facts.num_items, 1)


def sum_and_count(values: Tensor) -> tuple[Tensor, float]:
    """A statistic with one value per token, or per sample."""
    return values.detach().float().sum(), float(values.shape[0])
