"""Curricula: choose the tasks of the next batch from the results of earlier ones.

A task is a request; tasks of one curriculum may belong to different envs. Each curriculum keeps a success rate per task: a
plain mean at first, then an exponential moving average, so that it follows the policy.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from ludic.types import ConfigError, Rollout, RolloutRequest, by_session, derive_seed, prompt_key


class Curriculum(Protocol):
    """Chooses the requests of the next batch and observes their rollouts."""

    def next_requests(self) -> list[RolloutRequest]: ...

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Record finished rollouts of requests that this curriculum chose."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """A curriculum whose numbers are logged with each batch."""

    def metrics(self) -> Mapping[str, float]: ...


class TaskCurriculum(ABC):
    """A fixed list of tasks, a success rate for each, and a rule (`choose`) that picks from them."""

    def __init__(
        self,
        tasks: Sequence[RolloutRequest],
        *,
        batch_size: int,
        seed: int = 0,
        success_at: float = 1.0,
        forget: float = 0.1,
    ) -> None:
        """`success_at`: the smallest total reward that counts as a success. `forget`: the minimum weight of a new rollout in
        the moving average."""
        if not tasks:
            raise ConfigError(f"{type(self).__name__} needs at least one task.")
        if not 1 <= batch_size <= len(tasks):
            raise ConfigError(
                f"batch_size={batch_size} of {len(tasks)} tasks; a batch holds each task at most once. "
                "Use a strategy to run a task several times."
            )
        if not 0 < forget <= 1:
            raise ConfigError(f"forget={forget}; it must lie in (0, 1].")
        self._tasks = [replace(task, meta={**task.meta, "task_index": index}) for index, task in enumerate(tasks)]
        self.batch_size = batch_size
        self._seed = seed
        self._success_at = success_at
        self._forget = forget
        self._num_draws = 0
        self.num_seen = [0] * len(tasks)
        """Rollouts observed, per task."""
        self.success_rates = [0.0] * len(tasks)
        """Meaningful where `num_seen` is above 0."""

    @abstractmethod
    def choose(self, rng: random.Random) -> list[int]:
        """The indices of `batch_size` different tasks."""

    def next_requests(self) -> list[RolloutRequest]:
        rng = random.Random(derive_seed(self._seed, self._num_draws))
        self._num_draws += 1
        return [self._tasks[index] for index in self.choose(rng)]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for session in by_session(rollouts):
            rollout = session[0]
            index = rollout.request_meta.get("task_index")
            if index is None:
                raise ConfigError(
                    f"{type(self).__name__} did not choose the request of rollout {rollout.id}: its request_meta has no "
                    "task_index. Pass only rollouts of next_requests()."
                )
            self.num_seen[index] += 1
            share = max(1 / self.num_seen[index], self._forget)
            success = float(sum(part.own_reward for part in session) >= self._success_at)
            self.success_rates[index] += share * (success - self.success_rates[index])

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_draws": self._num_draws,
            "num_seen": list(self.num_seen),
            "success_rates": list(self.success_rates),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["num_seen"]) != len(self._tasks):
            raise ConfigError(
                f"The saved curriculum has {len(state['num_seen'])} tasks, this one {len(self._tasks)}. Resume with the "
                "tasks that the run was started with."
            )
        self._num_draws = state["num_draws"]
        self.num_seen = list(state["num_seen"])
        self.success_rates = list(state["success_rates"])


class UniformCurriculum(TaskCurriculum):
    """Draws every task with the same probability."""

    def choose(self, rng: random.Random) -> list[int]:
        return rng.sample(range(len(self._tasks)), self.batch_size)


class EasiestFirstCurriculum(TaskCurriculum):
    """Starts with the easiest tasks and adds harder ones when the mean success rate is high enough."""

    def __init__(
        self,
        tasks: Sequence[RolloutRequest],
        *,
        difficulty: Callable[[RolloutRequest], float],
        batch_size: int,
        advance_at: float = 0.8,
        **settings: Any,
    ) -> None:
        """`advance_at`: the mean success rate of the open tasks at which the next `batch_size` tasks open."""
        super().__init__(tasks, batch_size=batch_size, **settings)
        if not 0 <= advance_at <= 1:
            raise ConfigError(f"advance_at={advance_at}; it is a success rate, from 0 to 1.")
        self._by_difficulty = sorted(range(len(tasks)), key=lambda index: difficulty(tasks[index]))
        self._advance_at = advance_at
        self.num_open = batch_size

    def choose(self, rng: random.Random) -> list[int]:
        return rng.sample(self._by_difficulty[: self.num_open], self.batch_size)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        super().observe(rollouts)
        open_tasks = self._by_difficulty[: self.num_open]
        if sum(self.success_rates[index] for index in open_tasks) >= self._advance_at * len(open_tasks):
            self.num_open = min(self.num_open + self.batch_size, len(self._tasks))

    def metrics(self) -> Mapping[str, float]:
        return {"num_open_tasks": float(self.num_open)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_open": self.num_open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_open = state["num_open"]


class SuccessBandCurriculum(TaskCurriculum):
    """Prefers tasks whose success rate lies in a band, and tasks not tried yet.

    Tasks outside the band keep a small weight, because the policy changes.
    """

    def __init__(
        self,
        tasks: Sequence[RolloutRequest],
        *,
        batch_size: int,
        low: float = 0.2,
        high: float = 0.8,
        outside_weight: float = 0.05,
        **settings: Any,
    ) -> None:
        super().__init__(tasks, batch_size=batch_size, **settings)
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"The band low={low} to high={high} is empty or out of range; it needs 0 <= low <= high <= 1."
            )
        if outside_weight <= 0:
            raise ConfigError(f"outside_weight={outside_weight}; it must be above 0, or a task is never tried again.")
        self._low, self._high, self._outside_weight = low, high, outside_weight

    def choose(self, rng: random.Random) -> list[int]:
        return _choose_weighted([self._weight(index) for index in range(len(self._tasks))], self.batch_size, rng)

    def _weight(self, index: int) -> float:
        is_in_band = self.num_seen[index] == 0 or self._low <= self.success_rates[index] <= self._high
        return 1.0 if is_in_band else self._outside_weight


def _choose_weighted(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Draw `count` different indices in proportion to their weights, without replacement."""
    # Efraimidis and Spirakis, 2006: the largest values of u^(1/w) are such a draw.
    keys = [rng.random() ** (1 / weight) for weight in weights]
    return sorted(range(len(keys)), key=lambda index: -keys[index])[:count]


class KnowsSuccess(Protocol):
    """Tracks the success rate of each prompt, such as the value tracker of `make_spo`."""

    def success_of(self, key: str) -> float:
        """Success rate between 0 and 1 of the prompt with this key."""
        ...


class PrioritisedCurriculum(TaskCurriculum):
    """Draws tasks with weight √(v(1 − v)) + eps, where v is the success rate in `values` (SPO, arXiv 2509.13232).

    √(v(1 − v)) is the standard deviation of the task's outcome: a task that is always or never solved teaches little. The
    curriculum only reads `values`. The credit assigner updates them after it has read the values of a batch; an update
    here, before credit is assigned, would bias the baseline.
    """

    def __init__(
        self,
        tasks: Sequence[RolloutRequest],
        values: KnowsSuccess,
        *,
        batch_size: int,
        eps: float = 0.05,
        **settings: Any,
    ) -> None:
        """`eps`: added to every weight, so that solved and unsolved tasks are still tried: the policy changes."""
        super().__init__(tasks, batch_size=batch_size, **settings)
        if eps <= 0:
            raise ConfigError(f"PrioritisedCurriculum.eps={eps}; it must be above 0, or a task is never tried again.")
        self._values = values
        self._eps = eps
        self._keys = [prompt_key(task.meta) for task in self._tasks]

    def choose(self, rng: random.Random) -> list[int]:
        return _choose_weighted([self.weight_of(index) for index in range(len(self._tasks))], self.batch_size, rng)

    def weight_of(self, index: int) -> float:
        """Sampling weight of a task."""
        success = self._values.success_of(self._keys[index])
        return float((success * (1 - success)) ** 0.5) + self._eps
