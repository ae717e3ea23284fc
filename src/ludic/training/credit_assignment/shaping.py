"""`PotentialShaping`: pay for progress without changing what is best (Ng, Harada and Russell 1999).

For use with `Relabelled`: `Relabelled(MonteCarloReturn(gamma=0.0), PotentialShaping(info_potential("progress")))`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ludic.training.credit_assignment.grouping import (
    Floats,
    Weights,
    check_discount,
    finished,
    returns_to_go,
    turn_rewards,
)
from ludic.types import (
    ConfigError,
    CreditAssigner,
    EnvironmentStep,
    FollowsDrift,
    Rollout,
    SAWBatch,
    SAWItem,
    Stateful,
    Step,
    Turn,
    is_parse_failure,
)

# `Relabelled`: judge rollouts by other rewards than they were paid (hindsight, shaping), then assign credit.
# The hook sees a rollout when it is over and hands back a copy with other rewards. What was played, logged and counted
# keeps the rewards of the env: only the weights change.
#
# Rewards, and not tokens: samples are cut from what was really sampled. A goal that stands in the prompt cannot be
# replaced here, for the sampled log-probs belong to the prompt that the policy saw.

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
    paid = {_payee(turn).id: float(reward) for turn, reward in zip(rollout.turns(), rewards, strict=True)}
    return replace(rollout, steps=[replace(step, reward=paid.get(step.id, 0.0)) for step in rollout.steps])


def _payee(turn: Turn) -> Step:
    """The last step whose reward counts for the episode's total; in a turn that was cut short, its last step."""
    counted = [step for step in turn.steps if step.kind == "env" or is_parse_failure(step)]
    return counted[-1] if counted else turn.last


def _same_steps(changed: Sequence[Step], steps: Sequence[Step]) -> bool:
    return len(changed) == len(steps) and all(
        a.index == b.index and (a.trace is b.trace or a.trace == b.trace) for a, b in zip(changed, steps, strict=True)
    )


PotentialFn: TypeAlias = Callable[[Rollout], Sequence[float] | Floats]
"""How promising the state before each turn is: one number per turn, from what was known before it."""


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """Turn t earns gamma * Phi(s_{t+1}) − Phi(s_t) on top; Phi is 0 once the episode is over, however it ended.

    The extra rewards telescope: with the same gamma, G_t becomes G_t − Phi(s_t), which no later action can change. So
    every expected gradient stays what it was, and rules that look at whole episodes see no difference but noise. What
    it is for are rules that look a few turns ahead (a smaller gamma, GAE with lam < 1): to them, progress is visible
    at the turn that made it.

    A potential left standing where a time limit cuts the episode off would pay for ending in promising states; that
    is why it is 0 there too.
    """

    potential: PotentialFn
    gamma: float = 1.0
    """Discount per turn of the task, not of the rule that looks a few turns ahead."""

    def __post_init__(self) -> None:
        check_discount("PotentialShaping", "gamma", self.gamma)

    def __call__(self, rollout: Rollout) -> Rollout:
        rewards_T = turn_rewards(rollout)
        phi_T = np.asarray(self.potential(rollout), dtype=np.float64)
        if phi_T.shape != rewards_T.shape or not np.isfinite(phi_T).all():
            raise ValueError(
                f"PotentialShaping.potential gave {phi_T.tolist()} for rollout {rollout.id!r}, which has "
                f"{len(rewards_T)} turns. Return one finite number per turn: the potential before it."
            )
        after_T = np.append(phi_T[1:], 0.0) if len(phi_T) else phi_T
        return with_turn_rewards(rollout, rewards_T + self.gamma * after_T - phi_T)


def info_potential(key: str, *, start: float = 0.0) -> PotentialFn:
    """The last info[key] that the env gave before the turn; `start` before it gave any."""

    def potential(rollout: Rollout) -> list[float]:
        values = []
        latest = start
        for turn in rollout.turns():
            values.append(latest)
            told = [step.info[key] for step in turn.steps if isinstance(step, EnvironmentStep) and key in step.info]
            latest = float(told[-1]) if told else latest
        return values

    return potential


# Credit modifiers: what is added to the weights of samples that have been credited already, token by token.
# A modifier takes a batch and returns one, as every preprocess hook does; an algorithm runs it before a batch becomes tensors.


class CreditModifier(Protocol):
    """Changes weights and nothing else."""

    def __call__(self, batch: SAWBatch) -> SAWBatch: ...


@dataclass(frozen=True, slots=True)
class KLCreditModifier:
    """Adds coeff · (log π_teacher − log π_old) of each action token to its weight.

    The difference is a number that was fixed when the token was sampled, and no gradient flows into it. It has to be one:
    the gradient of log π − log π_teacher itself, over tokens that π sampled, has expectation zero.
    """

    coeff: float = 1.0
    discount: float = 0.0
    """How much a token answers for the tokens after it in its sample: 0 for none (the KL of each token, given what came
    before it), 1 for all (the KL of whole replies)."""
    name: str = "kl"
    """The batch's mean of log π_old − log π_teacher is logged as teacher_<name>."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coeff) and self.coeff >= 0):
            raise ConfigError(f"KLCreditModifier.coeff={self.coeff}; it must be 0 or more.")
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"KLCreditModifier.discount={self.discount}; it lies between 0 and 1.")

    def __call__(self, batch: SAWBatch) -> SAWBatch:
        _check_teachers(batch.items)
        gaps = [_gap(item) for item in batch.items]
        items = [self._modified(item, gap) for item, gap in zip(batch.items, gaps, strict=True)]
        return SAWBatch(items=items, meta={**batch.meta, f"teacher_{self.name}": _mean_kl(gaps)})

    def _modified(self, item: SAWItem, gap: npt.NDArray[np.float64]) -> SAWItem:
        weights = (item.token_weights + self.coeff * returns_to_go(gap, self.discount)).astype(np.float32)
        attachments = replace(item.attachments, token_weights=weights)
        return replace(item, weight=float(weights.mean()) if len(weights) else item.weight, attachments=attachments)


def _check_teachers(items: Sequence[SAWItem]) -> None:
    missing = [i for i, item in enumerate(items) if item.attachments.teacher_logps is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(items)} samples (the first is {missing[0]}) have no teacher log-probs. Wrap the batch source "
            "in ludic.batch_gen.TeacherAnnotatedBatchSource, which asks a teacher for them."
        )


def _gap(item: SAWItem) -> npt.NDArray[np.float64]:
    """How much likelier the teacher finds each token than the policy that sampled it did."""
    teacher, old = item.attachments.teacher_logps, item.actor_logps
    assert teacher is not None, "checked for the whole batch"
    if old is None:
        raise ConfigError(
            f"A sample (rollout {item.origin.rollout_id}) has no actor log-probs to compare the teacher's with. Ask the "
            "sampler for them: InferenceSpec(return_=ReturnSpec.for_rl())."
        )
    return teacher.astype(np.float64) - old


def _mean_kl(gaps: Sequence[npt.NDArray[np.float64]]) -> float:
    """Over tokens: an estimate of the reverse KL per token."""
    together = np.concatenate(gaps) if gaps else np.zeros(0)
    return -float(together.mean()) if len(together) else 0.0
