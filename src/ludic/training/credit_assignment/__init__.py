"""Credit assignment: from finished rollouts to one weight per step.

A rule sees a whole batch at once, so a baseline can compare siblings. It never touches tensors; turning weights into
gradients is the loss's job. Failed rollouts get no weight; every step of every other rollout gets one.
"""

from ludic.training.credit_assignment.constant import ConstantCredit
from ludic.training.credit_assignment.episodic import EpisodicReturn
from ludic.training.credit_assignment.generalized_advantage import GAE, ValueFn, gae
from ludic.training.credit_assignment.group_normalized import GroupNormalizedReturn
from ludic.training.credit_assignment.hybrid_normalized import HybridNormalizedReturn
from ludic.training.credit_assignment.kl_modifier import CreditModifier, KLCreditModifier
from ludic.training.credit_assignment.leave_one_out import LeaveOneOutReturn
from ludic.training.credit_assignment.monte_carlo import MonteCarloReturn
from ludic.training.credit_assignment.per_step import PerStepReward
from ludic.training.credit_assignment.potential_shaping import PotentialFn, PotentialShaping, info_potential
from ludic.training.credit_assignment.relabelled import Relabel, Relabelled, with_turn_rewards
from ludic.training.credit_assignment.role_baseline import RoleBaselineReturn, RoleFn, agent_in_env
from ludic.training.credit_assignment.routed import RoutedCredit
from ludic.training.credit_assignment.scaled import ScaledCredit
from ludic.training.credit_assignment.state_group import StateFn, StateGroupReturn, observation_before
from ludic.training.credit_assignment.tracked_value import TrackedValueReturn
from ludic.training.credit_assignment.turn_group import TurnGroupReturn
from ludic.training.credit_assignment.turn_leave_one_out import TurnLeaveOneOutReturn
from ludic.training.credit_assignment.turns_and_groups import Turn, returns_to_go, turns_of

__all__ = [
    "MonteCarloReturn", "EpisodicReturn", "PerStepReward", "ConstantCredit",
    "GroupNormalizedReturn", "HybridNormalizedReturn", "LeaveOneOutReturn", "TurnGroupReturn",
    "TrackedValueReturn",
    "GAE", "ValueFn", "gae",
    "CreditModifier", "KLCreditModifier", "ScaledCredit",
    "RoutedCredit",
    "TurnLeaveOneOutReturn", "StateGroupReturn", "StateFn", "observation_before",
    "RoleBaselineReturn", "RoleFn", "agent_in_env",
    "Relabelled", "Relabel", "with_turn_rewards", "PotentialShaping", "PotentialFn", "info_potential",
    "Turn", "turns_of", "returns_to_go",
]  # fmt: skip
