"""Credit assignment: from finished rollouts to one weight (advantage) per step.

Algorithms choose a rule; no torch here. A rule sees a whole batch, so a baseline can compare siblings; failed rollouts get no
weight. Start with group.py (GRPO's advantage) or returns.py.
"""

from ludic.training.credit_assignment.group import (
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutReturn,
    RoleBaselineReturn,
    RoleFn,
    agent_in_env,
)
from ludic.training.credit_assignment.grouping import Turn, returns_to_go, turns_of
from ludic.training.credit_assignment.returns import (
    ConstantCredit,
    EpisodicReturn,
    MonteCarloReturn,
    PerStepReward,
    ScaledCredit,
)
from ludic.training.credit_assignment.routed import RoutedCredit
from ludic.training.credit_assignment.shaping import (
    CreditModifier,
    KLCreditModifier,
    PotentialFn,
    PotentialShaping,
    Relabel,
    Relabelled,
    info_potential,
    with_turn_rewards,
)
from ludic.training.credit_assignment.states import StateFn, StateGroupReturn, observation_before
from ludic.training.credit_assignment.turns import TurnGroupReturn, TurnLeaveOneOutReturn
from ludic.training.credit_assignment.value import GAE, TrackedValueReturn, ValueFn, gae

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
