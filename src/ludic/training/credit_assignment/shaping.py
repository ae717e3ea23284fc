"""Other rewards than the env paid: relabelling, potential shaping, and a teacher's log-probs added to the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ludic.training.credit_assignment.combine import RuleOfRules
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
    Rollout,
    SAWBatch,
    SAWItem,
    Step,
    Turn,
    is_parse_failure,
)
from ludic.types.steps import SCORES

Relabel: TypeAlias = Callable[[Rollout], Rollout]
"""Makes a copy of a finished rollout with other rewards; `with_turn_rewards` makes one. It must not change its input."""


@dataclass(frozen=True, slots=True)
class Relabelled(RuleOfRules):
    """The weights that `rule` gives to the rollouts as `relabel` returns them: with other rewards (hindsight, shaping).

    Only weights change: rollouts, logs and statistics keep the rewards of the env. Tokens stay too, so a goal in the prompt
    cannot be replaced here: the sampled log-probs belong to the prompt that the policy saw. A goal chosen after the fact is
    biased, it rewards whatever was reached, luck included. `PotentialShaping` leaves the best policy as it was:
    `Relabelled(MonteCarloReturn(gamma=0.0), PotentialShaping(info_potential("progress")))`.
    """

    rule: CreditAssigner
    relabel: Relabel

    def __post_init__(self) -> None:
        self._refuse_drift()

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return self.rule.compute([self._relabelled(rollout) for rollout in finished(rollouts)])

    def _rules(self) -> Mapping[str, CreditAssigner]:
        return {"rule": self.rule}

    def _relabelled(self, rollout: Rollout) -> Rollout:
        changed = self.relabel(rollout)
        if changed.id != rollout.id or not _same_steps(changed.steps, rollout.steps):
            raise ValueError(
                f"relabel gave rollout {changed.id!r} with {len(changed.steps)} steps for rollout {rollout.id!r} with "
                f"{len(rollout.steps)}, or other tokens. It may change rewards only: weights are keyed by rollout "
                "id and step index. with_turn_rewards(rollout, rewards) makes such a copy."
            )
        return changed


def with_turn_rewards(rollout: Rollout, rewards: Sequence[float] | Floats) -> Rollout:
    """A copy in which turn t earned rewards[t] and nothing else."""
    paid = {_payee(turn).id: float(reward) for turn, reward in zip(rollout.turns(), rewards, strict=True)}
    return replace(rollout, steps=[_paid(step, paid.get(step.id, 0.0)) for step in rollout.steps])


def _paid(step: Step, reward: float) -> Step:
    """A copy that earned this, as one component without a name."""
    info = {name: fact for name, fact in step.info.items() if name != SCORES}
    return replace(step, reward=reward, reward_components={}, info=info)


def _payee(turn: Turn) -> Step:
    """The last step whose reward counts for the episode's total; in a turn that was cut short, its last step."""
    counted = [step for step in turn.steps if step.kind == "env" or is_parse_failure(step)]
    return counted[-1] if counted else turn.last


def _same_steps(changed: Sequence[Step], steps: Sequence[Step]) -> bool:
    return len(changed) == len(steps) and all(
        a.index == b.index and (a.trace is b.trace or a.trace == b.trace) for a, b in zip(changed, steps, strict=True)
    )


PotentialFn: TypeAlias = Callable[[Rollout], Sequence[float] | Floats]
"""The promise of the state before each turn: one number per turn, from what was known before it."""


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """Turn t also earns gamma * Phi(s_{t+1}) − Phi(s_t) (Ng, Harada and Russell 1999).

    The extra rewards telescope: with the same gamma, G_t becomes G_t − Phi(s_t), which no later action can change. So every
    expected gradient stays what it was. It helps rules that look a few turns ahead (a smaller gamma, GAE with lam < 1): they
    see progress at the turn that made it. Phi is 0 once the episode is over, also where a limit ended it: else ending in a
    promising state would pay.
    """

    potential: PotentialFn
    gamma: float = 1.0
    """Discount per turn of the task, not of the rule that looks a few turns ahead."""

    def __post_init__(self) -> None:
        check_discount(self, gamma=self.gamma)

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


@dataclass(frozen=True, slots=True)
class KLCreditModifier:
    """A preprocess hook that adds coeff · (log π_teacher − log π_old) of each action token to its weight.

    The difference is a constant, fixed when the token was sampled: the gradient of log π − log π_teacher itself, over tokens
    that π sampled, has expectation zero.
    """

    coeff: float = 1.0
    discount: float = 0.0
    """Share of the difference of later tokens that a token gets: 0 none (the KL of each token, given what came before it), 1 all
    (the KL of whole replies)."""
    name: str = "kl"
    """The batch's mean of log π_old − log π_teacher is logged as teacher_<name>."""
    baseline: bool = False
    """Subtract from each sample the mean over all tokens of the other samples. The expected gradient stays the same; the noise of
    weights that are all below 0, as those of a distant teacher are, does not."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coeff) and self.coeff >= 0):
            raise ConfigError(f"KLCreditModifier.coeff={self.coeff}; it must be 0 or more.")
        check_discount(self, discount=self.discount)

    def __call__(self, batch: SAWBatch) -> SAWBatch:
        missing = [i for i, item in enumerate(batch.items) if item.attachments.teacher_logps is None]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(batch.items)} samples (the first is {missing[0]}) have no teacher log-probs. Wrap the "
                "batch source in ludic.batch_gen.TeacherAnnotatedBatchSource, which asks a teacher for them."
            )
        gaps = [_gap(item) for item in batch.items]
        credits = [self.coeff * returns_to_go(gap, self.discount) for gap in gaps]
        if self.baseline:
            credits = _less_the_mean_of_others(credits)
        items = [_modified(item, credit) for item, credit in zip(batch.items, credits, strict=True)]
        together = np.concatenate(gaps) if gaps else np.zeros(0)
        mean_kl = (
            -float(together.mean()) if len(together) else 0.0
        )  # over tokens: an estimate of the reverse KL per token
        return SAWBatch(items=items, meta={**batch.meta, f"teacher_{self.name}": mean_kl})


def _modified(item: SAWItem, credit: Floats) -> SAWItem:
    weights = (item.token_weights + credit).astype(np.float32)
    attachments = replace(item.attachments, token_weights=weights)
    return replace(item, weight=float(weights.mean()) if len(weights) else item.weight, attachments=attachments)


def _less_the_mean_of_others(credits: Sequence[Floats]) -> list[Floats]:
    """A sample's own tokens are left out of its baseline: later ones follow from earlier ones. One sample alone has none."""
    total, count = sum(float(own.sum()) for own in credits), sum(map(len, credits))
    return [own - (total - own.sum()) / max(count - len(own), 1) for own in credits]


def _gap(item: SAWItem) -> Floats:
    """[T] log π_teacher − log π_old of each action token."""
    teacher, old = item.attachments.teacher_logps, item.actor_logps
    assert teacher is not None, "checked for the whole batch"
    if old is None:
        raise ConfigError(
            f"A sample (rollout {item.origin.rollout_id}) has no actor log-probs to compare the teacher's with. Ask the "
            "sampler for them: InferenceSpec(return_=ReturnSpec.for_rl())."
        )
    return teacher.astype(np.float64) - old
