"""A stream of request groups, drawn one batch at a time.

A source that takes fewer groups than a draw returned (to refill a batch) gets the rest next time, also after a resume: the
saved state is that of the parts before the last draw and the number of groups taken from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.batch_gen.requests.dataset import RequestsFn
from ludic.batch_gen.requests.strategies import RequestStrategy
from ludic.types import RolloutRequest, Stateful

RequestGroup = list[RolloutRequest]


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
        """How many groups `take_draw` would return."""
        if not self._left:
            self._draw()
        return len(self._left)

    def take(self, num_groups: int) -> list[RequestGroup]:
        """`num_groups` groups, or fewer if a draw is empty."""
        taken: list[RequestGroup] = []
        while len(taken) < num_groups:
            if not self._left:
                self._draw()
                if not self._left:
                    break
            more = self._left[: num_groups - len(taken)]
            self._left = self._left[len(more) :]
            self._num_taken += len(more)
            taken += more
        return taken

    def _draw(self) -> None:
        self._before = self._states()
        requests = self._requests_fn()
        self._left = group_requests(self._strategy.expand(requests) if self._strategy else requests)
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


def group_requests(requests: Sequence[RolloutRequest]) -> list[RequestGroup]:
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
