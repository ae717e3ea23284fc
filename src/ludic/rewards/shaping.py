"""Penalties on length, as scorers: linear, DAPO's soft overlong punishment, and shorter than one's siblings.

Lengths are in tokens that the model sampled, prompts and observations not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ludic.types import ConfigError, LudicError, Rollout, Step

LengthOf: TypeAlias = Literal["reply", "episode"]
"""The longest reply of the episode, or all replies together."""


class UnknownLength(LudicError, ValueError):
    """A reply whose number of tokens is not known."""


@dataclass(kw_only=True)
class LengthPenalty:
    """−(tokens beyond `free_tokens`) / `per_tokens`."""

    per_tokens: int = 1000
    """Tokens that cost one point."""
    free_tokens: int = 0
    """Tokens that cost nothing."""
    of: LengthOf = "episode"
    name: str = "length"
    by_group: bool = False

    def __post_init__(self) -> None:
        if self.per_tokens < 1 or self.free_tokens < 0:
            raise ConfigError(
                f"LengthPenalty(per_tokens={self.per_tokens}, free_tokens={self.free_tokens}); at least 1 and 0."
            )

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        beyond = [max(0, num_tokens(rollout, self.of) - self.free_tokens) for rollout in rollouts]
        return [{self.name: -tokens / self.per_tokens} for tokens in beyond]


@dataclass(kw_only=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    0 up to `max_tokens` − `buffer_tokens`, then linearly down to −1 at `max_tokens`, −1 beyond.
    """

    max_tokens: int
    """The limit of a reply: `SamplingParams.max_tokens`."""
    buffer_tokens: int | None = None
    """The last tokens before the limit, in which the punishment grows. None: a fifth of the limit, as in the paper."""
    of: LengthOf = "reply"
    name: str = "overlong"
    by_group: bool = False

    def __post_init__(self) -> None:
        if self.buffer_tokens is None:
            self.buffer_tokens = max(1, self.max_tokens // 5)
        if not 1 <= self.buffer_tokens <= self.max_tokens:
            raise ConfigError(
                f"SoftOverlong(max_tokens={self.max_tokens}, buffer_tokens={self.buffer_tokens}); the buffer is a part of the "
                "limit, at least 1."
            )

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        buffer = self.buffer_tokens or 1
        into = [num_tokens(rollout, self.of) - (self.max_tokens - buffer) for rollout in rollouts]
        return [{self.name: -min(max(tokens, 0) / buffer, 1.0)} for tokens in into]


@dataclass(kw_only=True)
class ShorterThanSiblings:
    """0.5 for the shortest of the group, −0.5 for the longest, linear between; never above 0 for a wrong answer (Kimi k1.5,
    arXiv 2501.12599, section 2.3.3). 0 for all if they are equally long."""

    full_reward: float = 1.0
    """An answer is right if its env reward is at least this."""
    of: LengthOf = "episode"
    name: str = "shorter"
    by_group: bool = True

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        lengths = [num_tokens(rollout, self.of) for rollout in rollouts]
        low, high = min(lengths), max(lengths)
        if low == high:
            return [{self.name: 0.0} for _ in rollouts]
        scores = [0.5 - (length - low) / (high - low) for length in lengths]
        pairs = zip(rollouts, scores, strict=True)
        return [{self.name: score if self._is_right(rollout) else min(score, 0.0)} for rollout, score in pairs]

    def _is_right(self, rollout: Rollout) -> bool:
        # Rewards are often sums of parts such as 0.1, so allow for rounding.
        return rollout.scores.get("env", 0.0) >= self.full_reward - 1e-9


def num_tokens(rollout: Rollout, of: LengthOf = "episode") -> int:
    """Sampled tokens of the longest reply, or of all; UnknownLength if a reply has neither tokens nor a server's count."""
    lengths = [_length(step) for step in [*rollout.agent_steps, *_without_calls(rollout)]]
    return max(lengths, default=0) if of == "reply" else sum(lengths)


def _without_calls(rollout: Rollout) -> list[Step]:
    """Env steps that hold the tokens of model calls which are not steps of the rollout."""
    return [step for step in rollout.sampling_steps if step.kind == "env"]


def _length(step: Step) -> int:
    """The server's count if it reports one (a text endpoint, whose tokens are not in the trace), else the trace's."""
    counted = step.info.get("completion_tokens")
    length = counted if isinstance(counted, int) else len(step.trace.completion_token_ids) if step.trace else 0
    if length == 0 and step.action:
        raise UnknownLength(
            f"The reply of step {step.index} has no token ids, and its server did not count them. Use a client that returns token "
            "ids (a vLLM server, the embedded engine), or leave the penalty on length out."
        )
    return length
