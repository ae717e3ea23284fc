"""Prompt search: a learner that changes a text instead of weights, by reflection over rollouts (GEPA, arXiv 2507.19457).

Every candidate prompt is scored on the same tasks. A round takes a candidate of the Pareto front (the best ones at some task),
shows a reflector some of its rollouts, and keeps the prompt that it proposes if that earns more on the tasks that were shown.
The front keeps prompts that are good at different tasks, so a later proposal can build on either.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol, TypeAlias

from ludic.batch_gen import RolloutEngine
from ludic.judges.model import Asking
from ludic.judges.verdicts import DATA_NOTE, JudgeError, Words, case_of, section
from ludic.types import ConfigError, ProtocolSpec, Rollout, RolloutRequest, derive_seed

logger = logging.getLogger(__name__)
_CHOICE, _SAMPLING = 0, 1
Score: TypeAlias = Callable[[Sequence[Rollout]], float]
"""From the rollouts of one episode to a number; more is better."""


class Reflector(Protocol):
    """Reads what a prompt led to and writes a better one."""

    async def propose(self, prompt: str, rollouts: Sequence[Rollout]) -> str: ...


class ModelReflector:
    """A model that is shown the prompt, and of each rollout the task, the reply, its reward and what the env says about it."""

    def __init__(
        self, asking: Asking, *, goal: str = "earn a higher reward on tasks like these", feedback: str = "feedback"
    ) -> None:
        """`asking`: a `JudgeModel` or `JudgeAgent` of ludic.judges, which ask again until a reply can be read.
        `feedback`: key in the info of an episode's last env step."""
        self.asking, self.goal, self.feedback = asking, goal, feedback

    async def propose(self, prompt: str, rollouts: Sequence[Rollout]) -> str:
        head = (
            f"You improve the instruction of another model, so that it will {self.goal}. Say what its replies have in common that "
            f"costs reward, then write a new instruction: general rules, not answers to these tasks. {DATA_NOTE}"
        )
        parts = [head, section("instruction", self.asking.quote(prompt))]
        for rollout in rollouts:
            case, last = case_of(rollout), rollout.env_steps[-1:]
            told = last[0].info.get(self.feedback, "") if last else ""
            parts += [
                section("task", self.asking.quote(case.task)),
                section("reply", self.asking.quote(case.reply)),
                section("result", self.asking.quote(f"reward {rollout.total_reward:g}. {told}")),
            ]
        form = {"diagnosis": Words(), "instruction": Words("the whole new instruction")}
        found = await self.asking.ask("\n\n".join(parts), form)
        return str(found["instruction"]).strip()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that was scored."""

    prompt: str
    scores: tuple[float, ...]
    """One per task."""
    parent: int | None = None
    """Place of the candidate that it was made from; None for a given one."""

    @property
    def mean(self) -> float:
        return fmean(self.scores)


class PromptSearch:
    """Candidates, their scores, and the rounds that add to them."""

    def __init__(
        self,
        engine: RolloutEngine,
        tasks: Sequence[RolloutRequest],
        reflector: Reflector,
        *,
        start: str | Sequence[str] = "",
        argument: str = "system_prompt",
        shown: int = 3,
        score: Score | None = None,
        max_steps: int = 32,
        concurrency: int = 8,
        seed: int = 0,
    ) -> None:
        """`argument`: of the engine's protocol factory, which gets the prompt. `shown`: tasks whose rollouts a reflection sees.
        `score`: instead of the sum of an episode's rewards."""
        if not tasks or not 1 <= shown <= len(tasks):
            raise ConfigError(f"{len(tasks)} tasks, shown={shown}; a round shows at least 1 and at most all tasks.")
        self._engine, self._reflector, self._argument, self._shown = engine, reflector, argument, shown
        self._score = score or (lambda rollouts: sum(rollout.total_reward for rollout in rollouts))
        self._max_steps, self._concurrency, self._seed = max_steps, concurrency, seed
        # The same sampling seeds for every candidate: a difference is the prompt's, not luck's.
        self._tasks = [
            replace(task, num_episodes=1, sampling_seed=derive_seed(seed, _SAMPLING, index))
            for index, task in enumerate(tasks)
        ]
        self._start = [start] if isinstance(start, str) else list(dict.fromkeys(start))
        self.candidates: list[Candidate] = []
        self._rollouts: list[list[list[Rollout]]] = []
        """Of each candidate, by task."""
        self.num_episodes = self.num_reflections = self.num_rejected = 0

    @property
    def best(self) -> Candidate:
        """The highest mean score; of equal ones the first."""
        return max(self.candidates, key=lambda candidate: candidate.mean)

    def front(self) -> dict[int, int]:
        """Candidate → at how many tasks no other is better; without those that another one covers."""
        if not self.candidates:
            return {}
        top = [max(scores) for scores in zip(*(candidate.scores for candidate in self.candidates), strict=True)]
        wins = {
            place: {task for task, score in enumerate(candidate.scores) if score == top[task]}
            for place, candidate in enumerate(self.candidates)
        }
        order = sorted(wins, key=lambda place: (-len(wins[place]), -self.candidates[place].mean, place))
        kept: list[int] = []
        for place in order:
            if wins[place] and not any(wins[place] <= wins[other] for other in kept):
                kept.append(place)
        return {place: len(wins[place]) for place in sorted(kept)}

    async def search(self, max_episodes: int) -> Candidate:
        """Rounds until `max_episodes` have been played in all; returns the best candidate."""
        for prompt in self._start[len(self.candidates) :]:
            await self._add(prompt, None, {})
        while self.num_episodes + len(self._tasks) <= max_episodes:
            await self.round()
        return self.best

    async def round(self) -> bool:
        """One reflection; whether its prompt was kept. It is played on the shown tasks, and on the others if it is better there."""
        rng = random.Random(derive_seed(self._seed, _CHOICE, self.num_reflections))
        self.num_reflections += 1
        front = self.front()
        parent = rng.choices(list(front), weights=list(front.values()))[0]
        tasks = sorted(rng.sample(range(len(self._tasks)), self._shown))
        seen = [rollout for task in tasks for rollout in self._rollouts[parent][task]]
        before = self.candidates[parent]
        try:
            prompt = (await self._reflector.propose(before.prompt, seen)).strip()
        except JudgeError as error:
            logger.warning("reflection %d failed: %s", self.num_reflections, error)
            prompt = before.prompt
        if any(prompt == candidate.prompt for candidate in self.candidates):
            self.num_rejected += 1
            self.num_episodes += self._shown  # a reflector that repeats itself must not keep the search going
            return False
        found = await self._play(prompt, tasks)
        gain = sum(self._score(found[task]) - before.scores[task] for task in tasks)
        logger.info("reflection %d on candidate %d: %+.3g on %d tasks", self.num_reflections, parent, gain, len(tasks))
        if gain <= 0:
            self.num_rejected += 1
            return False
        await self._add(prompt, parent, found)
        return True

    async def _add(self, prompt: str, parent: int | None, known: dict[int, list[Rollout]]) -> None:
        rest = [task for task in range(len(self._tasks)) if task not in known]
        played = known | await self._play(prompt, rest)
        rollouts = [played[task] for task in range(len(self._tasks))]
        self.candidates.append(Candidate(prompt, tuple(float(self._score(own)) for own in rollouts), parent))
        self._rollouts.append(rollouts)

    async def _play(self, prompt: str, tasks: Sequence[int]) -> dict[int, list[Rollout]]:
        """The rollouts of each task; none of an episode that failed, which scores as one that earned nothing."""
        self.num_episodes += len(tasks)
        requests = [self._with_prompt(self._tasks[task], prompt) for task in tasks]
        episodes = await self._engine.run_episodes(requests, max_steps=self._max_steps, concurrency=self._concurrency)
        return {task: e.rollouts if e.failure is None else [] for task, e in zip(tasks, episodes, strict=True)}

    def _with_prompt(self, task: RolloutRequest, prompt: str) -> RolloutRequest:
        kwargs = {**task.protocol.kwargs, self._argument: prompt}
        return replace(task, protocol=ProtocolSpec(task.protocol.kind, kwargs))
