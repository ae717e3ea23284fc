"""In which order the samples of a dataset are drawn: pass after pass, each shuffled by its own seed."""

import random
from typing import Any

from ludic.types import ConfigError, derive_seed


class Passes:
    """Positions in a dataset, for ever; where it stands survives a resume."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        if num_samples < 1:
            raise ConfigError("There are no samples to draw from.")
        self.num_drawn = 0
        self._num_samples, self._shuffle, self._seed = num_samples, shuffle, seed
        self._order_of: tuple[int, list[int]] = (-1, [])

    @property
    def epoch(self) -> int:
        """How many passes are complete."""
        return self.num_drawn // self._num_samples

    def next_index(self) -> int:
        epoch, position = divmod(self.num_drawn, self._num_samples)
        self.num_drawn += 1
        return self._order(epoch)[position]

    def _order(self, epoch: int) -> list[int]:
        if self._order_of[0] != epoch:
            order = list(range(self._num_samples))
            if self._shuffle:
                random.Random(derive_seed(self._seed, epoch)).shuffle(order)
            self._order_of = (epoch, order)
        return self._order_of[1]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn, "num_samples": self._num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_samples"] != self._num_samples:
            raise ConfigError(
                f"The saved position is in a dataset of {state['num_samples']} samples, this one has {self._num_samples}. "
                "Resume with the data that the run was started with."
            )
        self.num_drawn = state["num_drawn"]
