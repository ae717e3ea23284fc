"""Rollout requests: pure data that says which episode to run, resolved by name through the registry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.types.errors import ConfigError
from ludic.types.sampling import InferenceSpec


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The environment, by registered name."""

    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProtocolSpec:
    """The interaction protocol, by registered name."""

    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CtxSpec:
    """The context strategy, by registered name."""

    kind: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """The episodes to run, and their settings."""

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

    @property
    def group_id(self) -> str | None:
        """Requests with the same id are one group; the request strategy writes it into their meta."""
        return self.meta.get("group_id")


PROMPT_KEYS = ("task_index", "sample_index")
"""Keys of a request's meta that identify its prompt, set by curricula and datasets; the first one present counts."""


def prompt_key(request_meta: Mapping[str, Any]) -> str:
    """The identity of a request's prompt: the same each time the prompt is repeated."""
    for name in PROMPT_KEYS:
        if request_meta.get(name) is not None:
            return f"{name}={request_meta[name]}"
    raise ConfigError(
        f"The meta of a request has {sorted(request_meta)}, but none of {' and '.join(PROMPT_KEYS)}, so its prompt cannot be "
        "recognised. Take requests from a curriculum or a dataset."
    )


# Seeds are derived by mixing: adding an index to a base seed makes neighbours collide (seed 7, call 1 = seed 8, call 0). The
# embedded inference engine computes the same function on tensors and in its GPU kernel (ludic.inference.local.sampling).

_MASK = (1 << 64) - 1
SEED_BITS = 48
"""Exact in JSON readers that only have doubles, and inside every backend's range."""
STEP_FACTOR = 0xD1342543DE82EF95
"""Multiplying by it distinguishes (a, b) from (b, a)."""
MIX_CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX_SHIFTS = (30, 27, 31)


def _mix(x: int) -> int:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    increment, first, second = MIX_CONSTANTS
    x = (x + increment) & _MASK
    x = ((x ^ (x >> MIX_SHIFTS[0])) * first) & _MASK
    x = ((x ^ (x >> MIX_SHIFTS[1])) * second) & _MASK
    return x ^ (x >> MIX_SHIFTS[2])


def derive_seed(base: int, *path: int) -> int:
    """A seed for one place below `base`, for instance (turn, call).

    Give at least one index. Same arguments, same seed, on every machine.
    """
    state = base
    for index in path:
        state = _mix((state * STEP_FACTOR + index) & _MASK)
    return state >> (64 - SEED_BITS)
