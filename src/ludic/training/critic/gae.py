"""Advantages from a critic: returns beyond what it expected, token by token or turn by turn.

Before an update the critic gives a value before each action token. Generalised advantage estimation turns values and rewards
into one weight per token, and into the return that the critic should have predicted. An episode that became several samples is
one chain: the estimate runs over all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ludic.training.credit_assignment import gae
from ludic.types import ConfigError, FloatArray, SAWItem, spread_of
from ludic.types.rollout import THREAD

Floats = npt.NDArray[np.float64]


class CriticKind(StrEnum):
    """The input of the critic."""

    SHARED = "shared"
    """The policy's hidden states; its gradient also moves the policy's layers."""
    DETACHED = "detached"
    """The policy's hidden states, detached: the critic's loss does not train the policy."""
    SEPARATE = "separate"
    """The hidden states of a second model, which is trained with the policy."""


class Advantages(Protocol):
    """Turns values and rewards into weights."""

    def credit(self, items: Sequence[SAWItem], values: Sequence[np.ndarray]) -> list[SAWItem]:
        """The samples with their advantages as weights, and with the critic's values and the returns."""
        ...


class _Chain(NamedTuple):
    """One episode: its samples end to end, one entry per action token."""

    rewards: Floats
    values: Floats
    """Expected return before each token."""
    bootstrap: float
    """Expected return after the last token."""
    samples: list[SAWItem]


@dataclass(frozen=True, kw_only=True, slots=True)
class _GAE(ABC):
    """Generalised advantage estimation; a subclass defines what one step is."""

    gamma: float = 1.0
    """Discount per step."""
    lam: float = 0.95
    normalize: bool = True
    """Centre and scale the advantages over the batch's tokens."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"{type(self).__name__}(gamma={self.gamma}, lam={self.lam}); both lie between 0 and 1.")

    def credit(self, items: Sequence[SAWItem], values: Sequence[np.ndarray]) -> list[SAWItem]:
        credited: dict[int, SAWItem] = {}
        for chain in _chains(items):
            bounds = np.cumsum([items[i].num_action_tokens for i in chain])[:-1]
            advantages, returns = self._estimate(_joined([items[i] for i in chain], [values[i] for i in chain]))
            for i, own, own_returns in zip(chain, np.split(advantages, bounds), np.split(returns, bounds), strict=True):
                credited[i] = _with(items[i], own, values[i], own_returns)
        done = [credited[i] for i in range(len(items))]
        return _normalized(done) if self.normalize else done

    @abstractmethod
    def _estimate(self, chain: _Chain) -> tuple[Floats, Floats]:
        """Advantages and returns of the tokens of one episode."""


class TokenGAE(_GAE):
    """Every action token is one step."""

    __slots__ = ()

    def _estimate(self, chain: _Chain) -> tuple[Floats, Floats]:
        advantages = gae(chain.rewards, chain.values, gamma=self.gamma, lam=self.lam, bootstrap=chain.bootstrap)
        return advantages, advantages + chain.values


class TurnGAE(_GAE):
    """A turn is one step: a reply, a tool loop, a summary and a reply.

    The critic's value before a turn's first action token is the turn's value, and all of its tokens get the turn's advantage.
    Each of them also learns to predict the turn's return. The values before the other tokens are not used, but for the last
    token of an episode that was cut off, which gives the bootstrap value.
    """

    __slots__ = ()

    def _estimate(self, chain: _Chain) -> tuple[Floats, Floats]:
        turns = np.concatenate([_attached(item, "token_turns") for item in chain.samples])
        starts = np.flatnonzero(np.diff(turns, prepend=-1.0))
        values_T = chain.values[starts]
        rewards_T = np.add.reduceat(chain.rewards, starts)
        advantages_T = gae(rewards_T, values_T, gamma=self.gamma, lam=self.lam, bootstrap=chain.bootstrap)
        lengths_T = np.diff(starts, append=len(turns))
        return np.repeat(advantages_T, lengths_T), np.repeat(advantages_T + values_T, lengths_T)


def _chains(items: Sequence[SAWItem]) -> list[list[int]]:
    """Indices of the samples of each rollout, in the order of its segments."""
    if any(item.origin.delegate == THREAD for item in items):
        raise ConfigError(
            "The batch has several threads of one agent's session, and only the main one ends with the reward: a critic would "
            "take the others for failures. Use an algorithm without a critic (make_grpo, make_rloo), which EpisodeCredit credits."
        )
    found: dict[str | int, list[int]] = {}
    for index, item in enumerate(items):
        rollout_id = item.origin.rollout_id
        found.setdefault(index if rollout_id is None else rollout_id, []).append(index)
    return [_in_order(items, chain) for chain in found.values()]


def _in_order(items: Sequence[SAWItem], chain: list[int]) -> list[int]:
    segments = {i: items[i].origin.segment for i in chain}
    if len(set(segments.values())) < len(chain):
        raise ConfigError(
            f"The batch has a segment of rollout {items[chain[0]].origin.rollout_id} twice (segments "
            f"{sorted(segments.values())}): its rewards would count twice. A critic needs every episode once in a batch; do not "
            "replay samples to it."
        )
    return sorted(chain, key=segments.__getitem__)


def _joined(samples: list[SAWItem], values: Sequence[np.ndarray]) -> _Chain:
    expected = np.concatenate(values).astype(np.float64)
    # An episode that a limit cut off would have continued with about the value of its last token.
    bootstrap = float(expected[-1]) if samples[-1].origin.episode_truncated else 0.0
    return _Chain(np.concatenate([_attached(item, "token_rewards") for item in samples]), expected, bootstrap, samples)


def _attached(item: SAWItem, name: str) -> Floats:
    values: FloatArray | None = getattr(item.attachments, name)
    if values is None:
        raise ConfigError(
            f"A sample (rollout {item.origin.rollout_id}) has no attachments.{name}, which this critic needs and stitching writes."
        )
    return values.astype(np.float64)


def _with(item: SAWItem, advantages: Floats, values: np.ndarray, returns: Floats) -> SAWItem:
    attachments = replace(
        item.attachments,
        token_weights=advantages.astype(np.float32),
        token_values=np.asarray(values, dtype=np.float32),
        token_returns=returns.astype(np.float32),
    )
    return replace(item, weight=float(advantages.mean()), attachments=attachments)


def _normalized(items: list[SAWItem]) -> list[SAWItem]:
    everything = np.concatenate([item.token_weights for item in items]).astype(np.float64)
    # The advantages of a perfect critic are rounding errors of values and returns.
    spread = spread_of(everything, np.concatenate([made for item in items for made in _made_of(item)]))
    mean, factor = everything.mean(), 1 / (spread + 1e-8) if spread else 0.0
    done = []
    for item in items:
        weights = ((item.token_weights - mean) * factor).astype(np.float32)
        done.append(
            replace(item, weight=float(weights.mean()), attachments=replace(item.attachments, token_weights=weights))
        )
    return done


def _made_of(item: SAWItem) -> tuple[FloatArray, FloatArray]:
    values, returns = item.attachments.token_values, item.attachments.token_returns
    assert values is not None and returns is not None, "written just before"
    return values, returns
