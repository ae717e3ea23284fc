"""Cross-entropy on what the env answered: the policy learns to predict the consequences of its actions (ECHO)."""

from torch import Tensor

from ludic.training.losses.base import Loss, Needs, require_not_negative
from ludic.training.losses.tokens import ActionTokens, Stats, sum_and_count


class ObservationLoss(Loss):
    """−coeff · mean ℓ over the observation tokens of the batch.

    Every rollout counts, also one whose weight is 0. Observations were not sampled: there are no ratios, and no temperature.
    """

    needs = Needs(observations=True, old_logps=False)

    def __init__(self, *, coeff: float = 1.0) -> None:
        require_not_negative(coeff=coeff)
        self.coeff = coeff

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        if tokens.observed is None:
            raise KeyError("ObservationLoss needs log-probs of observation tokens, which the Trainer computes for it.")
        logps = tokens.observed.logps
        loss = -self.coeff * logps.sum() / max(tokens.facts.num_observed, 1)
        return loss, {
            "observation_logp_mean": sum_and_count(logps),
            "avg_observation_tokens": (logps.new_full((), logps.shape[0]), float(tokens.num_items)),
        }
