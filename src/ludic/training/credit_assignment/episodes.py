"""One credit per episode: the rollouts of an agent's session (forks, sub-agents, compaction) are judged as one.

The gateway records each thread of a session as a rollout. Only the main one ends with the session's reward, so a rule that saw
threads one by one would count the others as episodes that earned nothing, and a group would have too many members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ludic.training.credit_assignment.combine import RuleOfRules
from ludic.training.credit_assignment.grouping import Weights, finished
from ludic.types import CreditAssigner, FollowsDrift, Rollout, RolloutStepKey, Step, Turn, by_session


@dataclass(frozen=True, slots=True)
class EpisodeCredit(RuleOfRules):
    """What `inner` says of each episode as one rollout: all steps of its threads in time order, their rewards added up.

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
