"""Scoring, apart from the env, so that either can change alone."""

from typing import Protocol

from rolo.rl import Example, Reward, Trajectory


class RewardModel(Protocol):
    def score(self, example: Example, trajectory: Trajectory) -> Reward: ...
