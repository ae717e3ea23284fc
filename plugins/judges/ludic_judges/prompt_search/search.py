"""`PromptSearch`: candidates, their scores, and the rounds and merges that add to them."""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from ludic.batch_gen import RolloutEngine
from ludic.types import ConfigError, ProtocolSpec, Rollout, RolloutRequest, derive_seed, load_rollouts, save_rollouts
from ludic.util.files import parse_json, replacing, write_json
from ludic_judges.prompt_search.reflection import Merger, Reflector, Texts, merged_texts
from ludic_judges.verdicts import JudgeError

logger = logging.getLogger(__name__)
_CHOICE, _SAMPLING, _ENV, _MERGE = 0, 1, 2, 3
STATE, _FILE = "search.json", "candidate_{:04d}.jsonl"
Score: TypeAlias = Callable[[Sequence[Rollout]], float]
"""A function from the rollouts of one episode to a number; more is better."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Texts that were scored."""

    texts: Texts
    """One, or several, by the arguments that get them."""
    scores: tuple[float, ...]
    """One per task."""
    parent: int | None = None
    """Place of the candidate that it was made from; None for a given one."""
    merged_with: int | None = None
    """Place of the second parent of a merge."""

    @property
    def prompt(self) -> str:
        """The text of a search over one."""
        if len(self.texts) != 1:
            raise ConfigError(f"This candidate has several texts, {', '.join(self.texts)}: read `texts`.")
        return next(iter(self.texts.values()))

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
        start: str | Texts | Sequence[str | Texts] = "",
        shown: int = 3,
        max_merges: int = 0,
        score: Score | None = None,
        max_steps: int = 32,
        concurrency: int = 8,
        seed: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        """`start`: a prompt, or several; a dict is a prompt of several texts, by arguments of the engine's protocol factory.
        A prompt that is a text is `system_prompt`. `shown`: tasks whose rollouts a reflection sees. `max_merges`: how
        many merges are tried. `score`: instead of the sum of an episode's rewards. `folder`: the search is there after every
        round, and goes on from what is there."""
        if not tasks or not 1 <= shown <= len(tasks):
            raise ConfigError(f"{len(tasks)} tasks, shown={shown}; a round shows at least 1 and at most all tasks.")
        self._engine, self._reflector, self._shown, self._max_merges = engine, reflector, shown, max_merges
        self._score = score or (lambda rollouts: sum(rollout.total_reward for rollout in rollouts))
        self._max_steps, self._concurrency, self._seed = max_steps, concurrency, seed
        # The same seeds for every candidate: a difference is the prompt's, not luck's.
        self._tasks = [
            replace(
                task,
                num_episodes=1,
                env_seed=derive_seed(seed, _ENV, index) if task.env_seed is None else task.env_seed,
                sampling_seed=derive_seed(seed, _SAMPLING, index),
            )
            for index, task in enumerate(tasks)
        ]
        given = [start] if isinstance(start, (str, Mapping)) else start
        self._start: list[Texts] = []
        for texts in ({"system_prompt": one} if isinstance(one, str) else dict(one) for one in given):
            self._start += [texts] if texts not in self._start else []
        if not self._start or not self._start[0] or any(texts.keys() != self._start[0].keys() for texts in self._start):
            raise ConfigError("start has no text, or prompts with different texts; give each the same names.")
        self.candidates: list[Candidate] = []
        self._rollouts: list[list[list[Rollout]]] = []
        """The rollouts of each candidate, by task."""
        self.num_episodes = self.num_reflections = self.num_rejected = self.num_merges = 0
        self._has_new = False
        """A candidate was kept since the last merge."""
        self._tried: list[list[int]] = []
        """Pairs of candidates that were merged, or could not be."""
        self._num_saved = 0
        """Candidates whose rollouts are on disk."""
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and (self._folder / STATE).is_file():
            self._load(self._folder)

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

    async def search(self, max_episodes: int, *, on_round: Callable[[], None] | None = None) -> Candidate:
        """Rounds until `max_episodes` have been played in all; returns the best candidate. `on_round` is called after each round
        and each given prompt, when it is on disk."""
        tell = on_round or (lambda: None)
        for texts in self._start[len(self.candidates) :]:
            await self._add(texts, {})
            self._save()
            tell()
        while self.num_episodes + len(self._tasks) <= max_episodes:
            is_due = self._has_new and self.num_merges < self._max_merges
            if not is_due or (pair := self._next_pair()) is None:
                await self.round()
            else:
                await self._merge(*pair)
            tell()
        return self.best

    async def round(self) -> bool:
        """One reflection; whether its prompt was kept. It is played on the shown tasks, and on the others if it is better there."""
        is_kept = await self._reflect()
        self._has_new = self._has_new or is_kept
        self.num_rejected += not is_kept
        self._save()
        return is_kept

    async def _reflect(self) -> bool:
        rng = random.Random(derive_seed(self._seed, _CHOICE, self.num_reflections))
        names = list(self._start[0])
        name = names[self.num_reflections % len(names)]  # of several texts each in turn
        self.num_reflections += 1
        front = self.front()
        parent = rng.choices(list(front), weights=list(front.values()))[0]
        tasks = sorted(rng.sample(range(len(self._tasks)), self._shown))
        seen = [rollout for task in tasks for rollout in self._rollouts[parent][task]]
        before = self.candidates[parent]
        try:
            proposed = (await self._reflector.propose(before.texts[name], seen)).strip()
        except JudgeError as error:
            logger.warning("reflection %d failed: %s", self.num_reflections, error)
            proposed = before.texts[name]
        texts = {**before.texts, name: proposed}
        if self._is_known(texts):
            self.num_episodes += self._shown  # a reflector that repeats itself must not keep the search going
            return False
        found = await self._play(texts, tasks)
        gain = sum(self._score(found[task]) - before.scores[task] for task in tasks)
        logger.info("reflection %d on candidate %d: %+.3g on %d tasks", self.num_reflections, parent, gain, len(tasks))
        if gain > 0:
            await self._add(texts, found, parent)
        return gain > 0

    # --- merges ---

    def _next_pair(self) -> tuple[int, int, int] | None:
        """Two candidates of the front (the better one first) and a common ancestor that is no better than either, not tried yet:
        those that together have the highest scores. None if there are none."""
        found = []
        for one, two in combinations(self.front(), 2):
            first, second = sorted((one, two), key=lambda place: (-self.candidates[place].mean, place))
            above = [self._ancestors(place) for place in (first, second)]
            limit = self.candidates[second].mean
            shared = [place for place in above[0] & above[1] if self.candidates[place].mean <= limit]
            is_related = first in above[1] or second in above[0]
            if shared and not is_related and [first, second] not in self._tried:
                pairs = zip(self.candidates[first].scores, self.candidates[second].scores, strict=True)
                ancestor = max(shared, key=lambda place: (self.candidates[place].mean, place))
                found.append((sum(map(max, pairs)), -first, -second, ancestor))
        if not found:
            return None
        _, first, second, ancestor = max(found)
        return -first, -second, ancestor

    def _ancestors(self, place: int) -> set[int]:
        own = self.candidates[place]
        parents = {above for above in (own.parent, own.merged_with) if above is not None}
        return parents.union(*map(self._ancestors, parents))

    async def _merge(self, first: int, second: int, ancestor: int) -> None:
        """Play the merged candidate on tasks at which the two differ; keep it if it is as good there as the better of them."""
        self._tried.append([first, second])
        texts = await self._merged(*(self.candidates[place].texts for place in (ancestor, first, second)))
        if self._is_known(texts):  # nothing new comes of this pair
            self._save()
            return
        self.num_merges += 1
        self._has_new = False
        scores = [self.candidates[place].scores for place in (first, second)]
        tasks = self._telling_tasks(*scores)
        found = await self._play(texts, tasks)
        total = sum(self._score(found[task]) for task in tasks)
        needed = max(sum(own[task] for task in tasks) for own in scores)
        logger.info(
            "merge %d of candidates %d and %d: %.3g, needed %.3g", self.num_merges, first, second, total, needed
        )
        if total >= needed:
            await self._add(texts, found, first, second)
        else:
            self.num_rejected += 1
        self._save()

    async def _merged(self, ancestor: Texts, first: Texts, second: Texts) -> Texts:
        texts, has_conflict = merged_texts(ancestor, first, second)
        if not has_conflict or len(texts) > 1 or not isinstance(self._reflector, Merger):
            return texts
        try:
            ((name, text),) = ancestor.items()
            return {name: (await self._reflector.merge(text, first[name], second[name])).strip()}
        except JudgeError as error:
            logger.warning("a merge failed: %s", error)
            return texts

    def _telling_tasks(self, first: Sequence[float], second: Sequence[float]) -> list[int]:
        """`shown` tasks: in turn one at which the first is better, one at which the second is, one of the others."""
        rng = random.Random(derive_seed(self._seed, _MERGE, self.num_merges))
        kinds: list[list[int]] = [[], [], []]
        for task, (own, other) in enumerate(zip(first, second, strict=True)):
            kinds[0 if own > other else 1 if other > own else 2].append(task)
        for kind in kinds:
            rng.shuffle(kind)
        turns = [kind[turn] for turn in range(len(self._tasks)) for kind in kinds if turn < len(kind)]
        return sorted(turns[: self._shown])

    # --- episodes ---

    def _is_known(self, texts: Texts) -> bool:
        return any(texts == candidate.texts for candidate in self.candidates)

    async def _add(
        self, texts: Texts, known: dict[int, list[Rollout]], parent: int | None = None, merged_with: int | None = None
    ) -> None:
        rest = [task for task in range(len(self._tasks)) if task not in known]
        played = known | await self._play(texts, rest)
        rollouts = [played[task] for task in range(len(self._tasks))]
        scores = tuple(float(self._score(own)) for own in rollouts)
        self.candidates.append(Candidate(texts, scores, parent, merged_with))
        self._rollouts.append(rollouts)

    async def _play(self, texts: Texts, tasks: Sequence[int]) -> dict[int, list[Rollout]]:
        """The rollouts of each task; none of an episode that failed, which scores as one that earned nothing."""
        self.num_episodes += len(tasks)
        requests = [self._with_texts(self._tasks[task], texts) for task in tasks]
        episodes = await self._engine.run_episodes(requests, max_steps=self._max_steps, concurrency=self._concurrency)
        return {task: e.rollouts if e.failure is None else [] for task, e in zip(tasks, episodes, strict=True)}

    def _with_texts(self, task: RolloutRequest, texts: Texts) -> RolloutRequest:
        return replace(task, protocol=ProtocolSpec(task.protocol.kind, {**task.protocol.kwargs, **texts}))

    # --- on disk ---

    _COUNTS = ("num_episodes", "num_reflections", "num_rejected", "num_merges")

    def _settings(self) -> dict[str, Any]:
        """Settings that a resumed search must share."""
        tasks = [[t.env.kind, dict(t.env.kwargs), t.protocol.kind, t.env_seed] for t in self._tasks]
        digest = hashlib.sha256(json.dumps(tasks, default=str, sort_keys=True).encode()).hexdigest()[:16]
        return {"start": self._start, "shown": self._shown, "seed": self._seed, "tasks": digest}

    def _save(self) -> None:
        """The rollouts of new candidates first: what STATE names is there."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for place in range(self._num_saved, len(self._rollouts)):
            with replacing(self._folder / _FILE.format(place)) as unfinished:
                unfinished.unlink(missing_ok=True)  # of a killed process
                save_rollouts((rollout for own in self._rollouts[place] for rollout in own), unfinished)
        self._num_saved = len(self._rollouts)
        write_json(
            self._folder / STATE,
            {
                "settings": self._settings(),
                "counts": {name: getattr(self, name) for name in self._COUNTS},
                "has_new": self._has_new,
                "tried": self._tried,
                "candidates": [
                    {
                        "texts": dict(one.texts),
                        "scores": one.scores,
                        "parent": one.parent,
                        "merged_with": one.merged_with,
                        "num_rollouts": [len(own) for own in rollouts],
                    }
                    for one, rollouts in zip(self.candidates, self._rollouts, strict=True)
                ],
            },
        )

    def _load(self, folder: Path) -> None:
        state = parse_json((folder / STATE).read_text(encoding="utf-8"))
        mine = json.loads(json.dumps(self._settings()))
        if differ := [name for name, value in mine.items() if state["settings"].get(name) != value]:
            raise ConfigError(
                f"{folder} holds a search with other settings ({', '.join(differ)}). Give the same ones to go on with it, or "
                "another folder."
            )
        for name in self._COUNTS:
            setattr(self, name, state["counts"][name])
        self._has_new, self._tried = state["has_new"], state["tried"]
        for place, row in enumerate(state["candidates"]):
            numbers = row.pop("num_rollouts")
            self.candidates.append(Candidate(**{**row, "scores": tuple(row["scores"])}))
            stored = load_rollouts(folder / _FILE.format(place)) if any(numbers) else iter(())
            self._rollouts.append([list(islice(stored, number)) for number in numbers])
        self._num_saved = len(self.candidates)
