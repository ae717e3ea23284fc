"""Credit assignment: from finished rollouts to one weight per step.

A rule sees a whole batch at once, so a baseline can compare siblings. It never touches tensors; turning weights into
gradients is the loss's job. Failed rollouts get no weight; every step of every other rollout gets one.
"""

from ludic.training.credit_assignment.constant import ConstantCredit
from ludic.training.credit_assignment.episodic import EpisodicReturn
from ludic.training.credit_assignment.generalized_advantage import GAE, ValueFn, gae
from ludic.training.credit_assignment.group_normalized import GroupNormalizedReturn
from ludic.training.credit_assignment.hybrid_normalized import HybridNormalizedReturn
from ludic.training.credit_assignment.leave_one_out import LeaveOneOutReturn
from ludic.training.credit_assignment.monte_carlo import MonteCarloReturn
from ludic.training.credit_assignment.per_step import PerStepReward
from ludic.training.credit_assignment.turn_group import TurnGroupReturn
from ludic.training.credit_assignment.turns_and_groups import Turn, returns_to_go, turns_of

__all__ = [
    "MonteCarloReturn", "EpisodicReturn", "PerStepReward", "ConstantCredit",
    "GroupNormalizedReturn", "HybridNormalizedReturn", "LeaveOneOutReturn", "TurnGroupReturn",
    "GAE", "ValueFn", "gae",
    "Turn", "turns_of", "returns_to_go",
]  # fmt: skip
