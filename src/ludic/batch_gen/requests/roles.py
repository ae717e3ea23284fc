"""Which policy plays which role: `assign_roles` for one request, `AssignedRequests` for all requests of a batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ludic.batch_gen.requests.groups import RequestsFn
from ludic.interaction import Policies, RoleAssignment
from ludic.seeds import RoleSeeds
from ludic.types import ConfigError, RolloutRequest, derive_seed
from ludic.types.interfaces import load_into, state_of


def assign_roles(request: RolloutRequest, assignment: RoleAssignment) -> RolloutRequest:
    """The request with these policies in its roles. Its meta records them, so each rollout names its opponents."""
    policies = {"policies": dict(assignment)}
    protocol = replace(request.protocol, kwargs={**request.protocol.kwargs, **policies})
    return replace(request, protocol=protocol, meta={**request.meta, **policies})


class AssignedRequests:
    """Requests with one of `seatings` (role assignments) each; a league's name is replaced by one of its members.

    Both draws depend only on the env seeds of a call's requests. So the members of a group, which share a seed, meet the same
    opponent in the same roles, and a resumed run draws the same.
    """

    def __init__(
        self,
        requests_fn: RequestsFn,
        seatings: Sequence[RoleAssignment],
        policies: Policies,
        *,
        seed: int = 0,
        always: Sequence[str] = (),
    ) -> None:
        """`always`: policies that every call seats at least once, if it has as many groups as there are such policies."""
        if not seatings:
            raise ConfigError('AssignedRequests needs at least one seating, such as {"X": "first", "O": "second"}.')
        self._requests_fn = requests_fn
        self._seatings = [dict(seating) for seating in seatings]
        self._policies = policies
        self._seed = seed
        self._having = {name: [seats for seats in self._seatings if name in seats.values()] for name in always}
        if missing := [name for name, having in self._having.items() if not having]:
            raise ConfigError(f"No seating has {', '.join(missing)}. Add one, or leave it out of `always`.")

    def __call__(self) -> list[RolloutRequest]:
        requests = self._requests_fn()
        seats = self._seats([self._seed_of(request) for request in requests])
        return [assign_roles(request, seats[self._seed_of(request)]) for request in requests]

    def _seed_of(self, request: RolloutRequest) -> int:
        if request.env_seed is None:
            raise ConfigError(
                "AssignedRequests draws roles by a request's env_seed, and this request has none. Give it one."
            )
        return derive_seed(self._seed, request.env_seed)

    def _seats(self, seeds: Sequence[int]) -> dict[int, RoleAssignment]:
        """Seed of a group -> its seating, with a member for each league."""
        chosen = {seed: self._seatings[derive_seed(seed, RoleSeeds.ASSIGNMENT) % len(self._seatings)] for seed in seeds}
        for name, having in self._having.items():
            if not any(name in seating.values() for seating in chosen.values()):
                seed = self._seed_to_change(chosen)
                if seed is not None:
                    chosen[seed] = having[derive_seed(seed, RoleSeeds.CHANGED) % len(having)]
        return {
            seed: {
                agent_id: self._policies.draw(name, derive_seed(seed, RoleSeeds.VERSION, index))
                for index, (agent_id, name) in enumerate(seating.items())
            }
            for seed, seating in chosen.items()
        }

    def _seed_to_change(self, chosen: Mapping[int, RoleAssignment]) -> int | None:
        """A group that is not the only one of a policy in `always`; None if there are too few groups."""
        num_groups = Counter(
            name for seating in chosen.values() for name in set(seating.values()) & self._having.keys()
        )
        free = [seed for seed, seating in chosen.items() if all(num_groups[name] != 1 for name in seating.values())]
        return min(free, key=lambda seed: derive_seed(seed, RoleSeeds.CHANGED), default=None)

    def state_dict(self) -> dict[str, Any]:
        return state_of(self._requests_fn)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self._requests_fn, state)
