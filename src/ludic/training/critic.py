"""A critic on the policy's own hidden states, and what it is for: advantages token by token.

Before an update, the critic says what it expected before each action token; generalised advantage estimation turns that and
the rewards into one weight per token, and into what it should have expected. An episode that became several samples is one
chain: the estimate runs over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ludic.training.credit_assignment import gae
from ludic.training.policy import TrainedPolicy
from ludic.types import ConfigError, SAWItem


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGAE:
    """How values and rewards become advantages."""

    gamma: float = 1.0
    """Discount per action token."""
    lam: float = 0.95
    normalize: bool = True
    """Centre and scale the advantages over the batch's tokens."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"TokenGAE(gamma={self.gamma}, lam={self.lam}); both lie between 0 and 1.")

    def credit(self, items: Sequence[SAWItem], values: Sequence[np.ndarray]) -> list[SAWItem]:
        """The samples with their advantages as weights, and with what the critic said and should have said."""
        credited: dict[int, SAWItem] = {}
        for chain in _chains(items):
            rewards = np.concatenate([_rewards(items[i]) for i in chain])
            expected = np.concatenate([values[i] for i in chain]).astype(np.float64)
            # Cut off by a limit, the episode would have gone on from about where it stood.
            bootstrap = float(expected[-1]) if items[chain[-1]].meta.get("episode_truncated") else 0.0
            advantages = gae(rewards, expected, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap)
            bounds = np.cumsum([items[i].num_action_tokens for i in chain])[:-1]
            for i, own, returns in zip(
                chain, np.split(advantages, bounds), np.split(advantages + expected, bounds), strict=True
            ):
                credited[i] = _with(items[i], own, values[i], returns)
        done = [credited[i] for i in range(len(items))]
        return _normalized(done) if self.normalize else done


def _chains(items: Sequence[SAWItem]) -> list[list[int]]:
    """Indices of the samples of each rollout, in the order of its segments."""
    found: dict[object, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(item.meta.get("rollout_id", index), []).append(index)
    return [sorted(chain, key=lambda i: items[i].meta.get("segment", 0)) for chain in found.values()]


def _rewards(item: SAWItem) -> np.ndarray:
    rewards = item.attachments.token_rewards
    if rewards is None:
        raise ConfigError(
            f"A sample (rollout {item.meta.get('rollout_id')}) does not say what its tokens earned; a critic needs "
            "attachments.token_rewards, which stitching writes."
        )
    return rewards.astype(np.float64)


def _with(item: SAWItem, advantages: np.ndarray, values: np.ndarray, returns: np.ndarray) -> SAWItem:
    attachments = replace(
        item.attachments,
        token_weights=advantages.astype(np.float32),
        token_values=np.asarray(values, dtype=np.float32),
        token_returns=returns.astype(np.float32),
    )
    return replace(item, weight=float(advantages.mean()), attachments=attachments)


def _normalized(items: list[SAWItem]) -> list[SAWItem]:
    everything = np.concatenate([item.token_weights for item in items]).astype(np.float64)
    mean, deviation = everything.mean(), everything.std() + 1e-8
    done = []
    for item in items:
        weights = ((item.token_weights - mean) / deviation).astype(np.float32)
        done.append(
            replace(item, weight=float(weights.mean()), attachments=replace(item.attachments, token_weights=weights))
        )
    return done


class ValueHead(nn.Module):
    """One number per hidden state; it begins at zero, so that the first advantages are plain returns."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_AD: Tensor) -> Tensor:
        values: Tensor = self.linear(hidden_AD.to(self.linear.weight.dtype))[:, 0]
        return values.float()


@torch.no_grad()
def expected_values(
    policy: TrainedPolicy, head: ValueHead, batches: Sequence[Sequence[SAWItem]], pad_token_id: int = 0
) -> dict[int, np.ndarray]:
    """What the critic says before each action token of every sample, by the sample's identity."""
    found: dict[int, np.ndarray] = {}
    for members in batches:
        batch = policy.batch(members, pad_token_id)
        values = head(policy.action_hidden(batch)).cpu().numpy()
        counts = np.cumsum([item.num_action_tokens for item in members])[:-1]
        for item, own in zip(members, np.split(values, counts), strict=True):
            found[id(item)] = own
    return found
