"""Credit assignment: from finished rollouts to one weight (advantage) per step.

Algorithms choose a rule; no torch here. A rule sees a whole batch, so a baseline can compare siblings; failed rollouts get no
weight. Start with group.py (GRPO's advantage) or returns.py.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy
from ludic.training.credit_assignment.group import (
    ComponentNormalizedReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutReturn,
    MaximumLikelihoodReturn,
    ProposerSolverReturn,
    RoleBaselineReturn,
    RoleFn,
    agent_in_env,
    learnability,
)
from ludic.training.credit_assignment.grouping import returns_to_go
from ludic.training.credit_assignment.returns import ConstantCredit, EpisodicReturn, MonteCarloReturn, PerStepReward

if TYPE_CHECKING:
    from ludic.training.credit_assignment.branches import FoldedReturn, ProcessFn, fold_penalties
    from ludic.training.credit_assignment.combine import EpisodeCredit, RoutedCredit, ScaledCredit
    from ludic.training.credit_assignment.shaping import (
        KLCreditModifier,
        PotentialFn,
        PotentialShaping,
        Relabel,
        Relabelled,
        info_potential,
        with_turn_rewards,
    )
    from ludic.training.credit_assignment.turns import (
        StateFn,
        StateGroupReturn,
        TurnGroupReturn,
        TurnLeaveOneOutReturn,
        observation_before,
    )
    from ludic.training.credit_assignment.value import GAE, BetaValueTracker, TrackedValueReturn, ValueFn, gae

__all__ = [
    "MonteCarloReturn", "EpisodicReturn", "PerStepReward", "ConstantCredit", "GroupNormalizedReturn", "HybridNormalizedReturn",
    "LeaveOneOutReturn", "MaximumLikelihoodReturn", "FoldedReturn", "ProcessFn", "fold_penalties", "ProposerSolverReturn",
    "learnability", "ComponentNormalizedReturn", "RoleBaselineReturn", "RoleFn", "agent_in_env", "TurnGroupReturn",
    "TurnLeaveOneOutReturn", "StateGroupReturn", "StateFn", "observation_before", "TrackedValueReturn", "BetaValueTracker", "GAE",
    "ValueFn", "gae", "KLCreditModifier", "ScaledCredit", "RoutedCredit", "EpisodeCredit", "Relabelled", "Relabel",
    "with_turn_rewards", "PotentialShaping", "PotentialFn", "info_potential", "returns_to_go",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "branches": "FoldedReturn ProcessFn fold_penalties",
        "combine": "EpisodeCredit RoutedCredit ScaledCredit",
        "shaping": "KLCreditModifier PotentialFn PotentialShaping Relabel Relabelled info_potential with_turn_rewards",
        "turns": "StateFn StateGroupReturn TurnGroupReturn TurnLeaveOneOutReturn observation_before",
        "value": "GAE BetaValueTracker TrackedValueReturn ValueFn gae",
    },
)
