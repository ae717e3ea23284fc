"""Credit where rollouts have different objectives: each is credited by the rule of its objective."""

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.types import ConfigError, CreditAssigner, FollowsDrift, Rollout, RolloutStepKey, Stateful


class RoutedCredit:
    """By the objective that a rollout's request names; siblings are only compared within one objective."""

    def __init__(self, assigners: Mapping[str, CreditAssigner], *, default: str | None = None) -> None:
        """`default`: the objective of rollouts that name none."""
        if default is not None and default not in assigners:
            raise ConfigError(f"default={default!r}; there are the objectives {', '.join(assigners)}.")
        followers = [name for name, part in assigners.items() if isinstance(part, FollowsDrift)]
        if followers:
            raise ConfigError(
                f"The rules of {followers} want to know how far each update moves the policy, which a rule among others "
                "is not told. Train that algorithm on its own, or use a rule without a tracker (make_reinforce_pp)."
            )
        self.assigners, self.default = dict(assigners), default

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]:
        members: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            members.setdefault(self._objective(rollout), []).append(rollout)
        return {
            key: weight for name, own in members.items() for key, weight in self.assigners[name].compute(own).items()
        }

    def _objective(self, rollout: Rollout) -> str:
        name = rollout.objective or self.default
        if name is None or name not in self.assigners:
            raise ConfigError(
                f"Rollout {rollout.id} has the objective {name!r}; there are {', '.join(self.assigners)}. Name one in "
                'RolloutRequest(meta={"objective": …}), or give each source the algorithm for its objective.'
            )
        return name

    def state_dict(self) -> dict[str, Any]:
        """Of the rules that remember something."""
        return {name: part.state_dict() for name, part in self.assigners.items() if isinstance(part, Stateful)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.assigners.items():
            if isinstance(part, Stateful) and name in state:
                part.load_state_dict(state[name])
