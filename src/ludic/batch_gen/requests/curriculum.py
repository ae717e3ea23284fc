"""Inter-batch control: which tasks come next, given how the earlier ones went.

A task is a request; tasks of one curriculum may belong to different envs. Curricula here keep a success rate per task,
which follows the policy: it is a mean at first and forgets slowly later.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ludic.types import ConfigError, Rollout, RolloutRequest, derive_seed, prompt_key


class Curriculum(Protocol):
    """Chooses the requests of the next batch and is told how they went."""

    def next_requests(self) -> list[RolloutRequest]: ...

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Finished rollouts of requests that it chose."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
        """`success_at`: the total reward from which a rollout counts as a success. `forget`: the least share that a new
        rollout has in the rate."""
        if not tasks:
            raise ConfigError(f"{type(self).__name__} needs at least one task.")
        if not 1 <= batch_size <= len(tasks):
            raise ConfigError(
                f"batch_size={batch_size} of {len(tasks)} tasks; a batch holds each task at most once. "
                "Use a strategy to play a task several times."
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
        for rollout in rollouts:
            index = rollout.request_meta.get("task_index")
            if index is None:
                raise ConfigError(
                    f"{type(self).__name__} was told of rollout {rollout.id}, whose request it did not choose: its "
                    "request_meta has no task_index."
                )
            self.num_seen[index] += 1
            share = max(1 / self.num_seen[index], self._forget)
            success = float(rollout.total_reward >= self._success_at)
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
    """Every task as likely as any other."""

    def choose(self, rng: random.Random) -> list[int]:
        return rng.sample(range(len(self._tasks)), self.batch_size)


class EasiestFirstCurriculum(TaskCurriculum):
    """The easiest tasks first; once those are mastered on average, harder ones join them."""

    def __init__(
        self,
        tasks: Sequence[RolloutRequest],
        *,
        difficulty: Callable[[RolloutRequest], float],
        batch_size: int,
        advance_at: float = 0.8,
        **settings: Any,
    ) -> None:
        """`advance_at`: the mean success rate of the open tasks at which another `batch_size` of them is opened."""
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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_open": self.num_open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_open = state["num_open"]


class SuccessBandCurriculum(TaskCurriculum):
    """Tasks that are neither hopeless nor solved: those whose success rate lies in a band, and those not tried yet.

    The others stay possible with a small weight, since the policy changes.
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
            raise ConfigError(f"The band from low={low} to high={high} is none; 0 <= low <= high <= 1 is needed.")
        if outside_weight <= 0:
            raise ConfigError(f"outside_weight={outside_weight}; it must be above 0, or a task is never tried again.")
        self._low, self._high, self._outside_weight = low, high, outside_weight

    def choose(self, rng: random.Random) -> list[int]:
        return choose_weighted([self._weight(index) for index in range(len(self._tasks))], self.batch_size, rng)

    def _weight(self, index: int) -> float:
        is_in_band = self.num_seen[index] == 0 or self._low <= self.success_rates[index] <= self._high
        return 1.0 if is_in_band else self._outside_weight


def choose_weighted(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """`count` different indices, each drawn in proportion to its weight among those that are left."""
    # Efraimidis and Spirakis, 2006: the largest u^(1/w) win.
    keys = [rng.random() ** (1 / weight) for weight in weights]
    return sorted(range(len(keys)), key=lambda index: -keys[index])[:count]


# ----------------------------------------------------------------------------------------------------
# `PrioritisedCurriculum`: more of the prompts whose outcome is open (SPO, arXiv 2509.13232).
# ----------------------------------------------------------------------------------------------------


class KnowsSuccess(Protocol):
    """Somebody who follows how well each prompt goes, such as the tracker of `make_spo`."""

    def success_of(self, key: str) -> float:
        """Between 0 and 1, by the prompt's key."""
        ...


class PrioritisedCurriculum(TaskCurriculum):
    """Tasks with weight √(v(1 − v)) + eps, where v is the success that `values` knows of.

    That is the standard deviation of the task's outcome: a task that is always or never solved teaches little. It only
    reads `values`. Whoever assigns credit counts the rewards, and does so after reading the values of a batch; counting
    them here, before credit is assigned, would bias it.
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
        """`eps`: what a task weighs that seems solved or hopeless; the policy changes, so it is tried again."""
        super().__init__(tasks, batch_size=batch_size, **settings)
        if eps <= 0:
            raise ConfigError(f"PrioritisedCurriculum.eps={eps}; it must be above 0, or a task is never tried again.")
        self._values = values
        self._eps = eps
        self._keys = [prompt_key(task.meta) for task in self._tasks]

    def choose(self, rng: random.Random) -> list[int]:
        return choose_weighted([self.weight_of(index) for index in range(len(self._tasks))], self.batch_size, rng)

    def weight_of(self, index: int) -> float:
        """How likely a task is, compared with the others."""
        success = self._values.success_of(self._keys[index])
        return float((success * (1 - success)) ** 0.5) + self._eps
