"""Judges of single replies: `LLMJudge` has one criterion, `RubricJudge` several, each with its own verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from ludic.tasks import all_or_none
from ludic.types import ConfigError, Rollout
from ludic.util.files import parse_toml
from ludic_judges.model import Asking
from ludic_judges.verdicts import DATA_NOTE, Case, Form, Score, Words, case_of, section

COMPARED = "what the reply answers, what the right answer is, and whether the two agree"
Show: TypeAlias = Callable[[Rollout], Case]
"""A replacement of `case_of`: the part of a rollout that a judge sees."""


def _shown_sections(case: Case, asking: Asking) -> list[str]:
    """Task, reference and reply, quoted and delimited. The reply is last: a group shares the prompt before it."""
    task, reply = asking.quote(case.task), asking.quote(case.reply)
    parts = [section("task", task)]
    if case.reference is not None:
        parts.append(section("right answer", asking.quote(case.reference)))
    return [*parts, section("reply", reply, task)]


class JudgeBase:
    """Base of all judges: a name, the model that answers, the part of a rollout that it sees, and metrics."""

    by_group = False

    def __init__(
        self, asking: Asking, *, name: str = "judge", show: Show | None = None, reference: str | None = None
    ) -> None:
        """`reference`: key in the info of the last env step of a right answer that the judge may see, such as target_answer."""
        if show is not None and reference is not None:
            raise ConfigError("show= makes the whole case; put the reference into it, and leave reference= out.")
        self.asking = asking
        self.name = name
        self._show = show
        self._reference = reference

    def case_of(self, rollout: Rollout) -> Case:
        return case_of(rollout, reference=self._reference) if self._show is None else self._show(rollout)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        """The components of each rollout; raises JudgeError if one cannot be judged."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """The judge's cost since it was made, by the names of metrics."""
        return self.asking.cost.metrics(self.name)


class LLMJudge(JudgeBase):
    """One score per reply, from 0 to 1: the judge's whole number on `scale`, as a share of it."""

    def __init__(
        self,
        asking: Asking,
        criterion: str,
        *,
        scale: tuple[int, int] = (0, 10),
        reason: str | None = None,
        **settings: Any,
    ) -> None:
        """`reason`: what the judge writes before the score, in words; by default one or two sentences, with a reference the two
        answers. `settings`: name, show, reference."""
        super().__init__(asking, **settings)
        if reason is None:
            reason = "one or two sentences" if self._reference is None else COMPARED
        self.criterion = criterion
        self.score_kind = Score(*scale)
        self.form: Form = {"reason": Words(reason), "score": self.score_kind}

    def question(self, case: Case) -> str:
        head = f"You grade a reply that another model gave to a task. The criterion:\n{self.criterion}\n\n{DATA_NOTE}"
        return "\n\n".join([head, *_shown_sections(case, self.asking)])

    async def grade(self, case: Case) -> float:
        verdict = await self.asking.ask(self.question(case), self.form)
        return self.score_kind.share(verdict["score"])

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        grades = await all_or_none(self.grade(self.case_of(rollout)) for rollout in rollouts)
        return [{self.name: grade} for grade in grades]


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """One line of a rubric."""

    name: str
    text: str
    weight: float = 1.0
    """Its share of the reward is its weight over the sum of all; a negative weight makes it a penalty."""
    scale: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(
                f"A criterion is named {self.name!r}; it becomes a part of a metric's name: use letters and _."
            )
        if self.weight == 0:
            raise ConfigError(f"The criterion {self.name} has weight 0; leave it out.")
        Score(*self.scale)


class RubricJudge(JudgeBase):
    """A verdict for each criterion; the components `name/criterion` add up to at most 1.

    A criterion is asked for in its own call, so that one verdict does not colour the next; `together` asks for all in one call.
    """

    def __init__(
        self, asking: Asking, criteria: Sequence[Criterion], *, together: bool = False, **settings: Any
    ) -> None:
        super().__init__(asking, **settings)
        if not criteria or len({criterion.name for criterion in criteria}) != len(criteria):
            raise ConfigError("A rubric needs at least one criterion, and no two with the same name.")
        self.criteria = tuple(criteria)
        self.together = together
        self._total = sum(abs(criterion.weight) for criterion in criteria)
        self._judges = [
            LLMJudge(asking, one.text, scale=one.scale, name=f"{self.name}/{one.name}") for one in self.criteria
        ]

    async def verdicts(self, case: Case) -> dict[str, float]:
        """Each criterion's own verdict, from 0 to 1."""
        if not self.together:
            grades = await all_or_none(judge.grade(case) for judge in self._judges)
            return {one.name: grade for one, grade in zip(self.criteria, grades, strict=True)}
        form: Form = {one.name: {"reason": Words(), "score": Score(*one.scale)} for one in self.criteria}
        listed = "\n".join(f"- {one.name}: {one.text}" for one in self.criteria)
        head = f"You grade a reply that another model gave to a task, by each of these criteria alone:\n{listed}\n\n{DATA_NOTE}"
        found = await self.asking.ask("\n\n".join([head, *_shown_sections(case, self.asking)]), form)
        return {one.name: Score(*one.scale).share(found[one.name]["score"]) for one in self.criteria}

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        found = await all_or_none(self.verdicts(self.case_of(rollout)) for rollout in rollouts)
        return [
            {f"{self.name}/{one.name}": one.weight / self._total * verdicts[one.name] for one in self.criteria}
            for verdicts in found
        ]


def read_criteria(path: str | Path) -> list[Criterion]:
    """The criteria of a TOML file: a table per criterion, `[name]` with text and, if wanted, weight and scale."""
    try:
        tables = parse_toml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The criteria in {path} cannot be read: {error}") from error
    known = {one.name for one in fields(Criterion)} - {"name"}
    found = []
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("text"), str) or set(table) - known:
            raise ConfigError(
                f'{path}: [{name}] must be a table with text = "…" and, if wanted, weight = 1.0 and scale = [0, 1].'
            )
        scale = table.get("scale", [0, 1])
        if not (isinstance(scale, list) and len(scale) == 2 and all(type(bound) is int for bound in scale)):
            raise ConfigError(f"{path}: [{name}] scale = {scale!r}; give two whole numbers, such as [0, 10].")
        weight = table.get("weight", 1.0)
        if type(weight) not in (int, float):
            raise ConfigError(f"{path}: [{name}] weight = {weight!r}; give a number.")
        found.append(Criterion(name=name, text=table["text"], weight=float(weight), scale=(scale[0], scale[1])))
    if not found:
        raise ConfigError(f'{path} has no criteria; write a table per criterion: [correct] and text = "…".')
    return found
