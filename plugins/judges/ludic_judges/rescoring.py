"""Stored rollouts with other rewards: `rescore` writes a new file, and says how the rewards have changed.

The scores of an earlier run are removed first, so the result is what the same episodes would have got with these rewards. A scorer
that raises fails the rollouts it was called for, as in a run. Groups stay whole, and the order of the file stays that of the first
rollout of each group, so a later training run on it is the same each time.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import StatisticsError, correlation, fmean

from ludic.batch_gen.store import index_lines
from ludic.interaction import score_or_record
from ludic.rewards import Rewards, remove_scores
from ludic.types import ConfigError, Rollout
from ludic.types.rollout_files import stored_rollout
from ludic.util.files import Line, replacing
from ludic.util.line_writer import LineWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoredRollout:
    """The rewards of one rollout before and after."""

    group: Hashable
    before: float
    after: float
    correct: bool | None
    """The env's own verdict, if it gave one."""
    scores: dict[str, float]
    """The components after, before their weights."""


@dataclass(slots=True)
class Rescored:
    """The changes that rescoring has made, without sub-tasks and rollouts that had failed before; the new file holds those too."""

    rollouts: list[RescoredRollout] = field(default_factory=list)
    num_failed: int = 0
    """Rollouts that a scorer has failed; the new file holds them as failed."""
    num_skipped: int = 0
    """Rollouts that had failed before."""
    failures: dict[str, int] = field(default_factory=dict)
    """Reasons of `num_failed`, with their number."""

    @property
    def before(self) -> float:
        return fmean(one.before for one in self.rollouts)

    @property
    def after(self) -> float:
        return fmean(one.after for one in self.rollouts)

    @property
    def correlation(self) -> float | None:
        """Pearson's, between the rewards before and after; None if one of them is the same for all rollouts."""
        try:
            return correlation([one.before for one in self.rollouts], [one.after for one in self.rollouts])
        except StatisticsError:
            return None

    @property
    def same_order(self) -> tuple[int, int]:
        """(pairs of siblings that both rewards order in the same way, pairs that both order): what credit depends on."""
        groups: dict[Hashable, list[RescoredRollout]] = {}
        for one in self.rollouts:
            groups.setdefault(one.group, []).append(one)
        signs = [
            (a.before - b.before) * (a.after - b.after) for group in groups.values() for a, b in combinations(group, 2)
        ]
        return sum(sign > 0 for sign in signs), sum(sign != 0 for sign in signs)


async def rescore(
    paths: Sequence[Path],
    out: Path,
    rewards: Rewards,
    *,
    chunk_rollouts: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rescored:
    """Read rollouts from files, score them with `rewards`, and write them to `out`, in one step at the end.

    `chunk_rollouts`: rollouts in memory, and scored at a time, at least. `on_progress` is called with the rollouts done and all.
    """
    units = _units(paths)
    num_all, num_done, found = sum(map(len, units)), 0, Rescored()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as unfinished:
        unfinished.unlink(missing_ok=True)
        writer = LineWriter(unfinished)
        for chunk in _chunks(units, chunk_rollouts):
            groups = [[stored_rollout(line) for line in lines] for lines in chunk]
            await asyncio.gather(*(_rescore_group(group, rewards, found) for group in groups))
            lines = [rollout.to_json() for group in groups for rollout in group]
            await asyncio.to_thread(writer.append, "".join(f"{line}\n" for line in lines).encode())
            num_done += len(lines)
            if on_progress is not None:
                on_progress(num_done, num_all)
    return found


async def _rescore_group(group: Sequence[Rollout], rewards: Rewards, found: Rescored) -> None:
    episodes: dict[Hashable, list[Rollout]] = {}
    before = {rollout.id: rollout.total_reward for rollout in group}
    fine = [rollout for rollout in group if rollout.failure is None]
    for rollout in fine:
        remove_scores(rollout)
        # A resumed run must not take it for an episode that it has played: the rewards are others.
        rollout.meta["engine"] = {**rollout.engine_facts, "request_key": None}
        episodes.setdefault(rollout.episode_run or rollout.id, []).append(rollout)
    await asyncio.gather(*(score_or_record(e, partial(rewards.score_episode, e)) for e in episodes.values()))
    whole = [rollout for e in episodes.values() if all(r.failure is None for r in e) for rollout in e]
    if rewards.compares_siblings and whole:
        await score_or_record(whole, partial(rewards.score_group, whole))
    found.num_skipped += len(group) - len(fine)
    for rollout in fine:
        if rollout.failure is not None:
            found.num_failed += 1
            found.failures[rollout.failure.summary] = found.failures.get(rollout.failure.summary, 0) + 1
        elif not rollout.is_sub_task:
            correct = rollout.env_steps[-1].info.get("correct") if rollout.env_steps else None
            found.rollouts.append(
                RescoredRollout(
                    group=rollout.group or rollout.id,
                    before=before[rollout.id],
                    after=rollout.total_reward,
                    correct=correct if isinstance(correct, bool) else None,
                    scores=rollout.scores,
                )
            )


def _units(paths: Sequence[Path]) -> list[list[Line]]:
    """The lines of the files by group; rollouts without a group by episode."""
    units: dict[Hashable, list[Line]] = {}
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"There is no file {path} to read rollouts from.")
        for line, head in index_lines(path):
            episode = Rollout(id=head.id, meta=head.meta).episode_run or head.id
            units.setdefault(("group", head.group_id) if head.group_id is not None else episode, []).append(line)
    if not units:
        raise ConfigError(f"There are no rollouts in {', '.join(map(str, paths)) or 'no files at all'}.")
    return list(units.values())


def _chunks(units: Sequence[list[Line]], num_rollouts: int) -> Iterator[list[list[Line]]]:
    chunk: list[list[Line]] = []
    for lines in units:
        chunk.append(lines)
        if sum(map(len, chunk)) >= num_rollouts:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """A judge's yes or no against the truth."""

    true_positives: int
    """Right replies that the judge accepts."""
    false_positives: int
    """Wrong replies that the judge accepts: what a policy would learn to exploit."""
    true_negatives: int
    false_negatives: int
    num_failed: int = 0
    """Cases without a verdict; they are in none of the other numbers."""

    @property
    def num(self) -> int:
        return self.true_positives + self.false_positives + self.true_negatives + self.false_negatives

    @property
    def accuracy(self) -> float:
        return (self.true_positives + self.true_negatives) / self.num

    @property
    def expected(self) -> float:
        """The accuracy of a judge with the same share of yes that does not look at the replies."""
        said, true = self.true_positives + self.false_positives, self.true_positives + self.false_negatives
        return (said * true + (self.num - said) * (self.num - true)) / self.num**2

    @property
    def kappa(self) -> float:
        """Cohen's kappa: 1 is perfect, 0 is what chance gives, also if judge or truth always say the same."""
        return 0.0 if self.expected == 1 else (self.accuracy - self.expected) / (1 - self.expected)

    @property
    def true_positive_rate(self) -> float | None:
        right = self.true_positives + self.false_negatives
        return self.true_positives / right if right else None

    @property
    def false_positive_rate(self) -> float | None:
        wrong = self.false_positives + self.true_negatives
        return self.false_positives / wrong if wrong else None


def agreement(scores: Sequence[float | None], correct: Sequence[bool], *, threshold: float = 0.5) -> Agreement:
    """A score of at least `threshold` is a yes; None is a case without a verdict.

    >>> found = agreement([0.9, 0.8, 0.2, None], [True, False, False, True])
    >>> found.num, round(found.accuracy, 3), found.num_failed
    (3, 0.667, 1)
    """
    pairs = [(s >= threshold, bool(c)) for s, c in zip(scores, correct, strict=True) if s is not None]
    if not pairs:
        raise ConfigError(f"There is no verdict to compare: {len(scores)} cases, none with a score.")
    return Agreement(
        true_positives=pairs.count((True, True)),
        false_positives=pairs.count((True, False)),
        true_negatives=pairs.count((False, False)),
        false_negatives=pairs.count((False, True)),
        num_failed=len(scores) - len(pairs),
    )


def pair_accuracy(groups: Sequence[Sequence[tuple[float, bool]]]) -> float | None:
    """The share of pairs of a right and a wrong sibling in which the right one scores higher; a tie is half of one. This is
    the area under the ROC curve within groups. `groups`: (score, correct) of each sibling. None if there is no such pair."""
    wins = [
        1.0 if good > bad else 0.5 if good == bad else 0.0
        for group in groups
        for good, is_right in group
        if is_right
        for bad, other_is_right in group
        if not other_is_right
    ]
    return fmean(wins) if wins else None
