"""Rules made of other rules: the weights of one times a number, or a rule for each objective."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.training.credit_assignment.grouping import Weights, finished
from ludic.types import (
    ConfigError,
    CreditAssigner,
    FollowsDrift,
    Rollout,
    RolloutStepKey,
    Stateful,
    Step,
    Turn,
    by_session,
)


class RuleOfRules(ABC):
    """Saves the state of its inner rules, and refuses those that the trainer must tell how far the policy moved."""

    __slots__ = ()

    @abstractmethod
    def _rules(self) -> Mapping[str, CreditAssigner]:
        """Name → inner rule."""

    def _refuse_drift(self) -> None:
        for name, rule in self._rules().items():
            if isinstance(rule, FollowsDrift):
                raise ConfigError(
                    f"{type(self).__name__} has {name}={type(rule).__name__}(…): the trainer tells this rule how far the policy "
                    "moved, but cannot reach it there. Train with that rule alone, or use one without a tracker, such as "
                    "GroupNormalizedReturn."
                )

    def state_dict(self) -> dict[str, Any]:
        return {name: rule.state_dict() for name, rule in self._rules().items() if isinstance(rule, Stateful)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, rule in self._rules().items():
            if isinstance(rule, Stateful) and name in state:
                rule.load_state_dict(state[name])


@dataclass(frozen=True, slots=True)
class ScaledCredit(RuleOfRules):
    """coeff · weight on every step, where credit of several kinds is added up."""

    inner: CreditAssigner
    coeff: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.coeff):
            raise ConfigError(f"ScaledCredit.coeff={self.coeff}; a weight must be finite.")
        self._refuse_drift()

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {step: self.coeff * weight for step, weight in self.inner.compute(rollouts).items()}

    def _rules(self) -> Mapping[str, CreditAssigner]:
        return {"inner": self.inner}


class RoutedCredit(RuleOfRules):
    """The rule of the objective that a rollout's request names; siblings are only compared within one objective."""

    def __init__(self, assigners: Mapping[str, CreditAssigner], *, default: str | None = None) -> None:
        """`default`: the objective of rollouts that name none."""
        if default is not None and default not in assigners:
            raise ConfigError(f"default={default!r}; there are the objectives {', '.join(assigners)}.")
        self.assigners, self.default = dict(assigners), default
        self._refuse_drift()

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
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

    def _rules(self) -> Mapping[str, CreditAssigner]:
        return self.assigners


@dataclass(frozen=True, slots=True)
class EpisodeCredit(RuleOfRules):
    """Credit by `inner` for each episode as one rollout: all steps of its threads in time order, their rewards added up.

    So a rule for whole episodes gives one advantage to all threads of a session, and a rule for turns credits each call by what
    followed it, in any thread. Players of one game and delegated sub-tasks stay separate rollouts, as do rollouts that no
    engine ran. A failed thread gets no weight; threads of a failed main rollout get 0, because their reward is not known.
    """

    inner: CreditAssigner

    def __new__(cls, inner: CreditAssigner | None = None) -> "EpisodeCredit":
        # Only a rule that follows drift may have `notify_drift`: the trainer measures drift for it, which costs forward passes.
        return object.__new__(_EpisodeCreditWithDrift if isinstance(inner, FollowsDrift) else cls)

    @property
    def group_size(self) -> int | None:
        """Episodes per group, if `inner` compares groups."""
        return getattr(self.inner, "group_size", None)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        finished(rollouts)  # refuses ids that occur twice
        sessions = by_session(rollouts)
        judged, unknown = (
            [finished(session) for session in sessions if _is_reward_known(session) is known] for known in (True, False)
        )
        merged = [_merge(threads) for threads in judged if threads]
        given = self.inner.compute([whole for whole, _ in merged])
        weights: Weights = {(r.id, step.index): 0.0 for threads in unknown for r in threads for step in r.steps}
        for whole, places in merged:
            pairs = zip(whole.steps, places, strict=True)
            weights |= {place: given[key] for step, place in pairs if (key := (whole.id, step.index)) in given}
        return weights

    def _rules(self) -> Mapping[str, CreditAssigner]:
        return {"inner": self.inner}


class _EpisodeCreditWithDrift(EpisodeCredit):
    __slots__ = ()

    def notify_drift(self, kl: float) -> None:
        assert isinstance(self.inner, FollowsDrift), "EpisodeCredit chooses this class for such rules only"
        self.inner.notify_drift(kl)


def _is_reward_known(session: Sequence[Rollout]) -> bool:
    main = session[0]
    return main.is_thread or main.failure is None


def _merge(threads: Sequence[Rollout]) -> tuple[Rollout, list[RolloutStepKey]]:
    """The episode as one rollout under the main one's id and meta, and the origin of each of its steps."""
    main, *others = sorted(threads, key=lambda rollout: (rollout.is_thread, rollout.id))
    if not others:
        return main, [(main.id, step.index) for step in main.steps]
    turns = [(turn, rollout) for rollout in (main, *others) for turn in rollout.turns()]
    # The turn that ends the session lasts until its reward, so all calls of other threads come before it. The sort is stable.
    turns.sort(key=lambda pair: (pair[1] is main and _ends_episode(pair[0]), pair[0].steps[0].ts_ns))
    placed = [(step, rollout.id) for turn, rollout in turns for step in turn.steps]
    steps = [_renumbered(step, index, rollout_id) for index, (step, rollout_id) in enumerate(placed)]
    return replace(main, steps=steps), [(rollout_id, step.index) for step, rollout_id in placed]


def _ends_episode(turn: Turn) -> bool:
    return turn.last.kind == "env" and (turn.last.terminated or turn.last.truncated)


def _renumbered(step: Step, index: int, rollout_id: str) -> Step:
    """A copy for the merged rollout. Turn ids need only be unique within a rollout."""
    return replace(step, index=index, turn_id=None if step.turn_id is None else f"{rollout_id}/{step.turn_id}")
