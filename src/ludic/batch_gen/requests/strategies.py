"""Request strategies: expand the requests of one batch, for example into groups."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ludic.types import ConfigError, RolloutRequest, derive_seed, new_id

_ENV_SEEDS, _SAMPLING_SEEDS = 0, 1


class RequestStrategy(Protocol):
    """Expands the requests of a batch before they run."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]: ...


class IdentityStrategy:
    """Returns the requests unchanged."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return list(requests)


class GRPORequestStrategy:
    """Repeats every request `group_size` times with one env seed, one group id and different sampling seeds.

    A request's own seeds are the base of the group's seeds; otherwise they derive from `seed` and the number of groups made so
    far, which `state_dict` keeps. `num_episodes` of the request is ignored.
    """

    def __init__(self, group_size: int, *, seed: int = 0) -> None:
        if group_size < 1:
            raise ConfigError(f"GRPORequestStrategy.group_size={group_size}; a group has at least one rollout.")
        self.group_size = group_size
        self._seed = seed
        self._num_groups = 0

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return [member for request in requests for member in self._group(request)]

    def _group(self, request: RolloutRequest) -> list[RolloutRequest]:
        number, self._num_groups = self._num_groups, self._num_groups + 1
        env_seed, base = request.env_seed, request.sampling_seed
        if env_seed is None:
            env_seed = derive_seed(self._seed, _ENV_SEEDS, number)
        if base is None:
            base = derive_seed(self._seed, _SAMPLING_SEEDS, number)
        meta = {**request.meta, "group_id": new_id()}
        return [
            # Hashed and not base + member: groups with adjacent base seeds must not share sampling seeds.
            replace(request, env_seed=env_seed, sampling_seed=derive_seed(base, member), num_episodes=1, meta=meta)
            for member in range(self.group_size)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"num_groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_groups = state["num_groups"]
