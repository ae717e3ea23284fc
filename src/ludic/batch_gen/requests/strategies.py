"""Intra-batch control: how the rollouts of one batch relate to each other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ludic.types import ConfigError, RolloutRequest, derive_seed, new_id

_ENV_SEEDS, _SAMPLING_SEEDS = 0, 1


class RequestStrategy(Protocol):
    """Expands what a curriculum asked for into what is played."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]: ...


class IdentityStrategy:
    """Every request as it is."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return list(requests)


class GRPORequestStrategy:
    """Every request `group_size` times: the same env seed, each its own sampling seed, one group id.

    A request's own seeds are the base of the group's; without them they come from `seed` and the number of groups made so
    far, which `state_dict` keeps. `num_episodes` of the request is not used: the group is its episodes.
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
            # Mixed, not counted up: neighbours whose base seeds are neighbours must not share any.
            replace(request, env_seed=env_seed, sampling_seed=derive_seed(base, member), num_episodes=1, meta=meta)
            for member in range(self.group_size)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"num_groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_groups = state["num_groups"]
