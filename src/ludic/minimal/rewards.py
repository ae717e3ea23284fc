"""`RewardModel`: from what happened to how good it was. Apart from the env, so that one can change without the other."""

from typing import Protocol

from ludic.minimal.rl import Example, Reward, Trajectory


class RewardModel(Protocol):
    def score(self, example: Example, trajectory: Trajectory) -> Reward: ...
