"""Proposer and solver (Absolute Zero, arXiv 2505.03335; R-Zero, 2508.05004): one role invents tasks, others attempt them.

The env pays the proposer by `learnability`: most for a task that half of the attempts solve. As solvers get better, such tasks
are harder ones.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.grouping import Weights, compared_totals, finished, same_on_every_step
from ludic.types import ConfigError, Rollout


def learnability(solved: float, *, target: float = 0.5) -> float:
    """1 for a task whose attempts are solved at the rate `target`, falling in a line to 0 at the rate furthest from it."""
    if not (0 <= solved <= 1 and 0 < target < 1):
        raise ConfigError(f"learnability(solved={solved}, target={target}); both are rates, the target not 0 or 1.")
    return 1.0 - abs(solved - target) / max(target, 1 - target)


@dataclass(frozen=True, slots=True)
class ProposerSolverReturn:
    """Total reward minus the mean, over the spread, of those that can be compared; the same on every step.

    Solvers: the attempts at one task, which are the other rollouts of the proposer's episode. An attempt that is alone in its
    episode is at a task of a dataset and compared in its group. Proposers: the proposals of one group, or of the batch if
    requests have no group. A trainer of one role alone works, too.
    """

    group_size: int | None = None
    """Episodes of a request; groups of any size are taken."""
    proposer: str = "proposer"
    """The agent id that proposes."""
    normalize_adv: bool = True

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        sizes: dict[str, int] = {}
        for rollout in kept:
            sizes[_episode(rollout)] = sizes.get(_episode(rollout), 0) + 1
        teams: dict[Hashable, list[Rollout]] = {}
        for rollout in kept:
            group: Hashable = rollout.group
            if rollout.agent_id == self.proposer:
                key: Hashable = ("proposals", group)
            else:
                is_alone = sizes[_episode(rollout)] == 1 and group is not None
                key = ("group", group) if is_alone else ("episode", _episode(rollout))
            teams.setdefault(key, []).append(rollout)
        weights: Weights = {}
        for members in teams.values():
            weights |= same_on_every_step(members, compared_totals(members, scaled=self.normalize_adv))
        return weights


def _episode(rollout: Rollout) -> str:
    return rollout.episode_run or rollout.id
