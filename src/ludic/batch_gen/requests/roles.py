"""Assigns policies to the roles of each request (see `ludic.interaction.policies`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ludic.batch_gen.requests.dataset import RequestsFn
from ludic.interaction import Policies, RoleAssignment
from ludic.types import ConfigError, RolloutRequest, Stateful, derive_seed

_ASSIGNMENT_SEEDS, _VERSION_SEEDS = 0, 1


def assign_roles(request: RolloutRequest, assignment: RoleAssignment) -> RolloutRequest:
    """The request with these policies in its roles. Its meta records them, so each rollout names its opponents."""
    policies = {"policies": dict(assignment)}
    protocol = replace(request.protocol, kwargs={**request.protocol.kwargs, **policies})
    return replace(request, protocol=protocol, meta={**request.meta, **policies})


class AssignedRequests:
    """Requests with one of `seatings` (role assignments) each; a league's name is replaced by one of its members.

    Both draws depend only on the request's env seed. So the members of a group, which share that seed, meet the same
    opponent in the same roles, and a resumed run draws the same.
    """

    def __init__(
        self, requests_fn: RequestsFn, seatings: Sequence[RoleAssignment], policies: Policies, *, seed: int = 0
    ) -> None:
        if not seatings:
            raise ConfigError('AssignedRequests needs at least one seating, such as {"X": "first", "O": "second"}.')
        self._requests_fn = requests_fn
        self._seatings = [dict(seating) for seating in seatings]
        self._policies = policies
        self._seed = seed

    def __call__(self) -> list[RolloutRequest]:
        return [assign_roles(request, self._draw(request)) for request in self._requests_fn()]

    def _draw(self, request: RolloutRequest) -> RoleAssignment:
        if request.env_seed is None:
            raise ConfigError(
                "AssignedRequests draws roles by a request's env_seed, and this request has none. Give it one."
            )
        seed = derive_seed(self._seed, request.env_seed)
        chosen = self._seatings[derive_seed(seed, _ASSIGNMENT_SEEDS) % len(self._seatings)]
        return {
            agent_id: self._policies.draw(name, derive_seed(seed, _VERSION_SEEDS, index))
            for index, (agent_id, name) in enumerate(chosen.items())
        }

    def state_dict(self) -> dict[str, Any]:
        return self._requests_fn.state_dict() if isinstance(self._requests_fn, Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self._requests_fn, Stateful):
            self._requests_fn.load_state_dict(state)
