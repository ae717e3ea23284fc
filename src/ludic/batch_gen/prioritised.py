"""`PrioritisedCurriculum`: more of the prompts whose outcome is open (SPO, arXiv 2509.13232)."""

import random
from collections.abc import Sequence
from typing import Any, Protocol

from ludic.batch_gen.curriculum import TaskCurriculum, choose_weighted
from ludic.types import ConfigError, RolloutRequest, prompt_key


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
