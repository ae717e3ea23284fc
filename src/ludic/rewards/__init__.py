"""Rewards from outside the env: scorers with weights, reward functions, penalties on length."""

from ludic.rewards.rewards import FunctionScorer, RenamedScorer, Rewards, as_scorer, remove_scores

__all__ = ["FunctionScorer", "RenamedScorer", "Rewards", "as_scorer", "remove_scores"]
