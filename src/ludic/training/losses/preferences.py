"""Learning from stored preferences: DPO (arXiv 2305.18290), IPO (2310.12036) and KTO (2402.01306).

A sample's implied reward is how much likelier the policy makes it than a frozen reference: d = Σ_t ℓ_t − ℓ_ref,t. Samples of
one comparison (`SampleOrigin.comparison`) stay in one micro-batch, so however a batch is cut, the gradient is the same. Weights
say what a sample is: above 0 preferred, below 0 not, 0 a completion of another prompt (KTO). They come from
`ludic.batch_gen.PreferenceBatchSource`.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludic.training.losses.base import Loss, Needs, require_not_negative, require_positive
from ludic.training.losses.tokens import ActionTokens, Stats, sum_and_count
from ludic.types import ConfigError


class _PreferenceLoss(Loss):
    needs = Needs(reference=True, old_logps=False)

    def __init__(self, beta: float, length_normalize: bool) -> None:
        require_positive(beta=beta)
        self.beta, self.length_normalize = beta, length_normalize

    def _implied(self, tokens: ActionTokens) -> Tensor:
        """[B] d of each sample, per token if length-normalised."""
        if tokens.ref_logps is None:
            raise KeyError(f"{type(self).__name__} needs a reference model: Trainer(reference=…), or a LoRA adapter.")
        combine = tokens.item_mean if self.length_normalize else tokens.item_sum
        return combine(tokens.logps - tokens.ref_logps)

    def _mean(self, values: Tensor, tokens: ActionTokens) -> Tensor:
        """Half of the batch's samples are what is averaged over: pairs, or samples that have one of another prompt beside them."""
        return values.sum() / max(tokens.facts.num_items / 2, 1)


def _members(tokens: ActionTokens, who: str) -> list[list[int]]:
    """The samples of each comparison."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(tokens.comparisons or (None,) * tokens.num_items):
        if name is None:
            raise ConfigError(
                f"{who} compares samples, but one names no comparison (SampleOrigin.comparison). Read preferences with "
                "PreferenceBatchSource."
            )
        found.setdefault(name, []).append(index)
    return list(found.values())


class PreferencePairLoss(_PreferenceLoss):
    """With h = d(chosen) − d(rejected): DPO −mean log σ(β h), IPO mean (h − 1 / (2 β))²."""

    def __init__(
        self, kind: Literal["dpo", "ipo"] = "dpo", *, beta: float = 0.1, length_normalize: bool = False
    ) -> None:
        super().__init__(beta, length_normalize)
        if kind not in ("dpo", "ipo"):
            raise ConfigError(f"PreferencePairLoss(kind={kind!r}); there are 'dpo' and 'ipo'.")
        self.kind = kind

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        implied_B, weights = self._implied(tokens), tokens.item_weights.tolist()
        pairs = [sorted(own, key=lambda index: -weights[index]) for own in _members(tokens, type(self).__name__)]
        for pair in pairs:
            if len(pair) != 2 or not weights[pair[0]] > 0 > weights[pair[1]]:
                raise ConfigError(
                    f"A comparison has samples of the weights {[weights[i] for i in pair]}; {self.kind} compares one above 0 with "
                    "one below 0. For single samples with a label use make_kto."
                )
        index_P2 = torch.tensor(pairs, dtype=torch.long, device=implied_B.device).view(-1, 2)
        chosen_P, rejected_P = implied_B[index_P2[:, 0]], implied_B[index_P2[:, 1]]
        gap_P = chosen_P - rejected_P
        terms_P = -logsigmoid(self.beta * gap_P) if self.kind == "dpo" else (gap_P - 1 / (2 * self.beta)).square()
        stats = {
            "margin": sum_and_count(self.beta * gap_P),
            "preference_accuracy": sum_and_count((gap_P > 0).float()),
            "chosen_reward": sum_and_count(self.beta * chosen_P),
            "rejected_reward": sum_and_count(self.beta * rejected_P),
        }
        return self._mean(terms_P, tokens), stats


class KTOLoss(_PreferenceLoss):
    """mean λ (1 − σ(±β (d − z))), + for wanted samples, − for others; z = max(0, mean d of other prompts' completions).

    z estimates the KL to the reference and has no gradient. It is that of one comparison, so micro-batches make no difference.
    """

    def __init__(
        self, *, beta: float = 0.1, wanted: float = 1.0, unwanted: float = 1.0, length_normalize: bool = False
    ) -> None:
        super().__init__(beta, length_normalize)
        require_not_negative(wanted=wanted, unwanted=unwanted)
        self.wanted, self.unwanted = wanted, unwanted

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        implied_B, weights = self._implied(tokens), tokens.item_weights.tolist()
        examples: list[int] = []
        baselines: list[Tensor] = []
        for own in _members(tokens, type(self).__name__):
            labelled = [index for index in own if weights[index]]
            if 2 * len(labelled) != len(own):
                raise ConfigError(
                    f"A comparison has {len(labelled)} samples with a label and {len(own) - len(labelled)} of other prompts; KTO "
                    "takes as many of both."
                )
            others = [index for index in own if not weights[index]]
            examples += labelled
            baselines += [implied_B[others].detach().mean().clamp(min=0.0)] * len(labelled)
        implied_E = implied_B[examples]
        sign_E = torch.sign(tokens.item_weights[examples])
        scale_E = torch.where(sign_E > 0, self.wanted, self.unwanted)
        kl_E = torch.stack(baselines) if baselines else implied_E.detach()
        terms_E = scale_E * torch.sigmoid(-sign_E * self.beta * (implied_E - kl_E))
        stats = {
            "wanted_reward": sum_and_count(self.beta * implied_E[sign_E > 0]),
            "unwanted_reward": sum_and_count(self.beta * implied_E[sign_E < 0]),
            "kl_baseline": sum_and_count(kl_E),
        }
        return self._mean(terms_E, tokens), stats
