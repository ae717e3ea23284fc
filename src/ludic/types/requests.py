"""Rollout requests: pure data that says which episode to run, resolved by name through the registry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.types.errors import ConfigError
from ludic.types.inference import InferenceSpec


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Which environment, by registered name."""

    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProtocolSpec:
    """Which interaction protocol, by registered name."""

    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CtxSpec:
    """Which context strategy, by registered name."""

    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One wish for rollouts."""

    env: EnvSpec
    protocol: ProtocolSpec
    env_seed: int | None = None
    sampling_seed: int | None = None
    inference: InferenceSpec | None = None
    num_episodes: int = 1
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_episodes < 1:
            raise ConfigError(f"RolloutRequest.num_episodes={self.num_episodes}; ask for at least one episode.")


PROMPT_KEYS = ("task_index", "sample_index")
"""What curricula and datasets write into a request's meta to say which prompt it is; the first that is there counts."""


def prompt_key(request_meta: Mapping[str, Any]) -> str:
    """A name for the prompt of a request that is the same each time the prompt comes back."""
    for name in PROMPT_KEYS:
        if request_meta.get(name) is not None:
            return f"{name}={request_meta[name]}"
    raise ConfigError(
        f"A request does not say which prompt it is: its meta has {sorted(request_meta)}, but neither of "
        f"{' and '.join(PROMPT_KEYS)}. Take requests from a curriculum or a dataset, whose prompts come back."
    )
