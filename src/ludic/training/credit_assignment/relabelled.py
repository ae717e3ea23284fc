"""`Relabelled`: judge rollouts by other rewards than they were paid (hindsight, shaping), then assign credit.

The hook sees a rollout when it is over and hands back a copy with other rewards. What was played, logged and counted
keeps the rewards of the env: only the weights change.

Rewards, and not tokens: samples are cut from what was really sampled. A goal that stands in the prompt cannot be
replaced here, for the sampled log-probs belong to the prompt that the policy saw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ludic.training.credit_assignment.turns_and_groups import Floats, Turn, Weights, finished, turns_of
from ludic.types import ConfigError, CreditAssigner, FollowsDrift, Rollout, Stateful, Step, is_parse_failure

Relabel: TypeAlias = Callable[[Rollout], Rollout]
"""From a finished rollout to a copy with other rewards; `with_turn_rewards` makes one. It must not change its input."""


@dataclass(frozen=True, slots=True)
class Relabelled:
    """The weights that `rule` gives to the rollouts as `relabel` sees them.

    A goal chosen after the fact is a biased teacher: it praises whatever was reached, luck included. Potential shaping
    (`PotentialShaping`) is the kind of relabelling that leaves the best policy as it was.
    """

    rule: CreditAssigner
    relabel: Relabel

    def __post_init__(self) -> None:
        if isinstance(self.rule, FollowsDrift):
            raise ConfigError(
                f"Relabelled(rule={type(self.rule).__name__}): this rule must hear from the trainer how far the policy "
                "moved, and would not through Relabelled. Use a rule that does not, such as MonteCarloReturn."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return self.rule.compute([self._relabelled(rollout) for rollout in finished(rollouts)])

    def _relabelled(self, rollout: Rollout) -> Rollout:
        changed = self.relabel(rollout)
        if changed.id != rollout.id or not _same_steps(changed.steps, rollout.steps):
            raise ValueError(
                f"relabel gave rollout {changed.id!r} with {len(changed.steps)} steps for rollout {rollout.id!r} with "
                f"{len(rollout.steps)}, or other tokens. It may change rewards only: weights are filed under rollout "
                "id and step index. with_turn_rewards(rollout, rewards) makes such a copy."
            )
        return changed

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.rule.state_dict()} if isinstance(self.rule, Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.rule, Stateful):
            self.rule.load_state_dict(state["rule"])


def with_turn_rewards(rollout: Rollout, rewards: Sequence[float] | Floats) -> Rollout:
    """A copy in which turn t earned rewards[t] and nothing else."""
    steps = [step for turn, reward in zip(turns_of(rollout), rewards, strict=True) for step in _paid(turn, reward)]
    return replace(rollout, steps=steps)


def _paid(turn: Turn, reward: float) -> list[Step]:
    payee = _payee(turn)
    return [replace(step, reward=float(reward) if i == payee else 0.0) for i, step in enumerate(turn.steps)]


def _payee(turn: Turn) -> int:
    """The last step whose reward counts for the episode's total; a turn that was cut short may have none."""
    counted = [i for i, step in enumerate(turn.steps) if step.kind == "env" or is_parse_failure(step)]
    return counted[-1] if counted else len(turn.steps) - 1


def _same_steps(changed: Sequence[Step], steps: Sequence[Step]) -> bool:
    return len(changed) == len(steps) and all(
        a.index == b.index and (a.trace is b.trace or a.trace == b.trace) for a, b in zip(changed, steps, strict=True)
    )
