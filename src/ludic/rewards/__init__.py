"""Rewards from outside the env: scorers with weights, reward functions, penalties on length."""

from ludic.rewards.rewards import FunctionScorer, Rewards, as_scorer, remove_scores

__all__ = ["FunctionScorer", "Rewards", "as_scorer", "remove_scores"]
