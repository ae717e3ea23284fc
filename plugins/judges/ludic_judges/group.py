"""Judges of siblings: `GroupJudge` ranks the replies of a group in one prompt, `PairwiseJudge` compares two at a time.

Scores are relative: 1 for a reply that is better than all others of its group, 0 for one that is worse than all. The order in which
replies are shown is random, from the seed and the replies themselves, so it depends neither on when episodes end nor on the run;
how much the order matters to the judge is measured (`PositionBias`). Equal replies are shown once and score the same.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from ludic.tasks import all_or_none
from ludic.types import ConfigError, Rollout, derive_seed
from ludic_judges.llm import JudgeBase
from ludic_judges.model import Asking
from ludic_judges.verdicts import DATA_NOTE, Choice, Form, JudgeError, Ranking, Words, mark_of, section

TIE = "tie"


class _Shown(NamedTuple):
    """A group's task, quoted."""

    text: str
    reference: str | None


@dataclass(slots=True)
class PositionBias:
    """The dependence of a judge's verdicts on the order in which replies are shown."""

    num_orders: int = 0
    """Verdicts on replies in some order."""
    first: float = 0.0
    """Sum of the scores of the reply shown first; `last` of the one shown last."""
    last: float = 0.0
    num_swapped: int = 0
    """Pairs that were shown in both orders."""
    num_same: int = 0
    """Those with the same winner both times."""

    def add(self, scores: Sequence[float]) -> None:
        """Count a verdict: the scores in the order in which the replies were shown."""
        self.num_orders += 1
        self.first += scores[0]
        self.last += scores[-1]

    @property
    def value(self) -> float | None:
        """Mean score of the first minus mean score of the last: 0 without bias, 1 if the first always wins, -1 if the last does."""
        return (self.first - self.last) / self.num_orders if self.num_orders else None

    def metrics(self, name: str) -> dict[str, float]:
        found = {} if self.value is None else {f"{name}/position_bias": self.value}
        return found | ({f"{name}/order_agreement": self.num_same / self.num_swapped} if self.num_swapped else {})

    def weights(self, name: str) -> dict[str, float]:
        """Over how many verdicts and pairs these metrics are means."""
        return {f"{name}/position_bias": float(self.num_orders), f"{name}/order_agreement": float(self.num_swapped)}


class SiblingJudge(JudgeBase):
    """Base of both judges of groups: from the rollouts of groups to distinct replies, and back."""

    by_group = True

    def __init__(self, asking: Asking, criterion: str, *, seed: int = 0, **settings: Any) -> None:
        """`settings`: name, show, reference."""
        super().__init__(asking, **settings)
        self.criterion = criterion
        self.seed = seed
        self.bias = PositionBias()

    async def compare(self, task: _Shown, replies: Sequence[str], rng: random.Random) -> list[float]:
        """A score from 0 to 1 for each of at least two different replies, which are quoted."""
        raise NotImplementedError

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, rollout in enumerate(rollouts):
            groups[rollout.group].append(place)
        found = await all_or_none(self._score_group([rollouts[i] for i in places]) for places in groups.values())
        scores = dict(zip(itertools.chain(*groups.values()), itertools.chain(*found), strict=True))
        return [{self.name: scores[place]} for place in range(len(rollouts))]

    async def _score_group(self, siblings: Sequence[Rollout]) -> list[float]:
        if len(siblings) < 2:
            raise JudgeError(
                f"The judge {self.name!r} compares siblings, but the group of rollout {siblings[0].id} has no other rollout. Give "
                "a group size of at least 2, or use a judge of single replies."
            )
        quote = self.asking.quote
        cases = [self.case_of(rollout) for rollout in siblings]
        replies = [quote(case.reply) for case in cases]
        first = cases[0]
        reference = None if first.reference is None else quote(first.reference)
        task = _Shown(quote(first.task), reference)
        distinct = sorted(set(replies))
        if len(distinct) == 1:
            return [0.5] * len(siblings)
        rng = random.Random(derive_seed(self.seed, int(mark_of(task.text, *distinct), 16)))
        scores = dict(zip(distinct, await self.compare(task, distinct, rng), strict=True))
        return [scores[reply] for reply in replies]

    def question(self, intro: str, task: _Shown, labelled: Mapping[str, str]) -> str:
        parts = [f"{intro} The criterion:\n{self.criterion}\n\n{DATA_NOTE}", section("task", task.text)]
        if task.reference is not None:
            parts.append(section("right answer", task.reference))
        texts = [task.text, *labelled.values()]
        return "\n\n".join([*parts, *(section(f"reply {label}", text, *texts) for label, text in labelled.items())])

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.bias.metrics(self.name)

    def mean_weights(self) -> dict[str, float]:
        return self.bias.weights(self.name)


class GroupJudge(SiblingJudge):
    """Ranks all replies of a group in one prompt; with `orders` above 1, in that many random orders, whose scores are averaged."""

    def __init__(self, asking: Asking, criterion: str, *, orders: int = 1, **settings: Any) -> None:
        super().__init__(asking, criterion, **settings)
        if orders < 1:
            raise ConfigError(f"orders={orders}; replies are shown in at least one order.")
        self.orders = orders

    async def compare(self, task: _Shown, replies: Sequence[str], rng: random.Random) -> list[float]:
        orders = [rng.sample(range(len(replies)), len(replies)) for _ in range(self.orders)]
        found = await all_or_none(self._rank(task, replies, order) for order in orders)
        return [fmean(scores[place] for scores in found) for place in range(len(replies))]

    async def _rank(self, task: _Shown, replies: Sequence[str], order: Sequence[int]) -> dict[int, float]:
        """Score by place in `replies`, which are shown in this order."""
        labels = labels_for(len(order))
        form: Form = {"reason": Words(), "ranking": Ranking(tuple(labels))}
        intro = f"You rank {len(order)} replies that another model gave to the same task."
        shown = {label: replies[place] for label, place in zip(labels, order, strict=True)}
        verdict = await self.asking.ask(self.question(intro, task, shown), form)
        rank = {label: place for place, label in enumerate(verdict["ranking"])}
        scores = [1 - rank[label] / (len(order) - 1) for label in labels]
        self.bias.add(scores)
        return dict(zip(order, scores, strict=True))


class PairwiseJudge(SiblingJudge):
    """Compares replies two at a time; a reply's score is the share of its comparisons that it wins, a tie being half of one.

    `opponents` is the number of others that each reply is compared with, by default all. With `both_orders` each pair is shown
    twice, which halves the effect of the position and measures how often the verdict depends on it.
    """

    def __init__(
        self,
        asking: Asking,
        criterion: str,
        *,
        opponents: int | None = None,
        both_orders: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(asking, criterion, **settings)
        if opponents is not None and opponents < 1:
            raise ConfigError(f"opponents={opponents}; each reply is compared with at least one other.")
        self.opponents = opponents
        self.both_orders = both_orders

    async def compare(self, task: _Shown, replies: Sequence[str], rng: random.Random) -> list[float]:
        pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in self._pairs(len(replies), rng)]
        shown = [*pairs, *(pair[::-1] for pair in pairs)] if self.both_orders else pairs
        shares = await all_or_none(self._share_of_first(task, replies, pair) for pair in shown)
        won = defaultdict[int, list[float]](list)
        for (first, second), share in zip(shown, shares, strict=True):
            won[first].append(share)
            won[second].append(1 - share)
        if self.both_orders:
            self.bias.num_swapped += len(pairs)
            half = len(pairs)
            self.bias.num_same += sum(one == 1 - other for one, other in zip(shares[:half], shares[half:], strict=True))
        return [fmean(won[place]) for place in range(len(replies))]

    def _pairs(self, num: int, rng: random.Random) -> Iterable[tuple[int, int]]:
        """All pairs; or, with fewer opponents, those up to a distance on a random ring."""
        if self.opponents is None or self.opponents >= num - 1:
            return itertools.combinations(range(num), 2)
        ring = rng.sample(range(num), num)
        reach = -(-self.opponents // 2)
        return list(dict.fromkeys((ring[i], ring[(i + d) % num]) for i in range(num) for d in range(1, reach + 1)))

    async def _share_of_first(self, task: _Shown, replies: Sequence[str], pair: tuple[int, int]) -> float:
        """1 if the first of the pair wins, 0 if the second does, 0.5 for a tie."""
        form: Form = {"reason": Words(), "winner": Choice(("A", "B", TIE))}
        intro = "You compare two replies, A and B, that another model gave to the same task."
        shown = {"A": replies[pair[0]], "B": replies[pair[1]]}
        winner = (await self.asking.ask(self.question(intro, task, shown), form))["winner"]
        share = {"A": 1.0, "B": 0.0, TIE: 0.5}[winner]
        self.bias.add([share, 1 - share])
        return share


def labels_for(num: int) -> list[str]:
    """A, B, … Z, A2, B2, …: letters, since a judge may take numbers for ranks."""
    letters = [chr(ord("A") + i) for i in range(26)]
    return [f"{letters[i % 26]}{i // 26 + 1 if i >= 26 else ''}" for i in range(num)]
