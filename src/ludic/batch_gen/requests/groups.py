"""Groups of requests: strategies that expand the requests of a batch into groups, and a stream that hands groups out.

A source that takes fewer groups than a draw returned (to refill a batch) gets the rest next time, also after a resume: the
saved state is that of the parts before the last draw and the number of groups taken from it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from ludic.interaction import Policies, RoleAssignment
from ludic.seeds import EpisodeSeeds, RoleSeeds
from ludic.types import ConfigError, RolloutRequest, Stateful, derive_seed, new_id
from ludic.types.interfaces import load_into, state_of

RequestsFn: TypeAlias = Callable[[], list[RolloutRequest]]
RequestGroup: TypeAlias = list[RolloutRequest]


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
            env_seed = derive_seed(self._seed, EpisodeSeeds.ENV, number)
        if base is None:
            base = derive_seed(self._seed, EpisodeSeeds.SAMPLING, number)
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


# --- the stream ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedGroup:
    """A group, and where it can be drawn again."""

    requests: RequestGroup
    before: dict[str, Any]
    """State of the parts before its draw."""
    index: int
    """In its draw."""


class RequestStream:
    """The groups of a request function and a strategy."""

    def __init__(
        self, requests_fn: RequestsFn, strategy: RequestStrategy | None, stateful: Mapping[str, object]
    ) -> None:
        self._requests_fn = requests_fn
        self._strategy = strategy
        parts = {**stateful, "strategy": strategy}
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
        self._left: list[RequestGroup] = []
        self._num_taken = 0
        self._before: dict[str, Any] = {}

    def take_draw(self) -> list[RequestGroup]:
        """The groups left of the last draw, or all groups of a new one."""
        return self.take(self.num_next())

    def num_next(self) -> int:
        """Number of groups that `take_draw` would return."""
        if not self._left:
            self._draw()
        return len(self._left)

    def take(self, num_groups: int) -> list[RequestGroup]:
        """`num_groups` groups, or fewer if a draw is empty."""
        return [placed.requests for placed in self.take_placed(num_groups)]

    def take_placed(self, num_groups: int) -> list[PlacedGroup]:
        """`take`, with the places of the groups."""
        taken: list[PlacedGroup] = []
        while len(taken) < num_groups:
            if not self._left:
                self._draw()
                if not self._left:
                    break
            more = self._left[: num_groups - len(taken)]
            self._left = self._left[len(more) :]
            first, self._num_taken = self._num_taken, self._num_taken + len(more)
            taken += [
                PlacedGroup(requests=group, before=self._before, index=index)
                for index, group in enumerate(more, start=first)
            ]
        return taken

    def take_again(self, before: dict[str, Any], index: int) -> PlacedGroup:
        """The group at a place of an earlier draw; the position stays. Its group id is new."""
        now = self.state_dict()
        self._restore(before)
        self._draw()
        found = PlacedGroup(requests=self._left[index], before=before, index=index)
        self.load_state_dict(now)
        return found

    def _draw(self) -> None:
        self._before = self._states()
        requests = self._requests_fn()
        self._left = _group_requests(self._strategy.expand(requests) if self._strategy else requests)
        self._num_taken = 0

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _restore(self, states: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(states[name])

    def state_dict(self) -> dict[str, Any]:
        if not self._left:
            return {"now": self._states()}
        return {"now": self._states(), "before": self._before, "num_taken": self._num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = []
        if "before" in state and self._parts:
            self._restore(state["before"])
            self._draw()
            self._left = self._left[state["num_taken"] :]
            self._num_taken = state["num_taken"]
        self._restore(state["now"])


def _group_requests(requests: Sequence[RolloutRequest]) -> list[RequestGroup]:
    """Group adjacent requests by group id; a request without one is a group by itself."""
    groups: list[RequestGroup] = []
    last: str | None = None
    for request in requests:
        if request.group_id is not None and request.group_id == last:
            groups[-1].append(request)
        else:
            groups.append([request])
        last = request.group_id
    return groups


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
