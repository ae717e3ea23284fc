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
