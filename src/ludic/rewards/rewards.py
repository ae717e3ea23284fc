"""`Rewards` adds the components of scorers to finished rollouts, with weights.

A component is a contribution: the components of a step add up to its reward. A scorer's component goes to the last step that
counts, multiplied by its weight; the value before the weight stays in that step's `info["scores"]`. The rollout engine decides
when episodes and groups are scored, and turns a scorer's error into a failed episode.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from ludic.tasks import all_or_none
from ludic.types import (
    ConfigError,
    EnvironmentStep,
    ReportsMeans,
    ReportsMetrics,
    Rollout,
    Scorer,
    ScorerContractError,
    Step,
    UnknownName,
    components_of,
    is_parse_failure,
)
from ludic.types.interfaces import UnsavedState, is_saved, load_into
from ludic.types.steps import MAX_REWARD, OWN_COMPONENTS, SCORES, own_scores

RewardFunction = Callable[..., Any]
"""`fn(rollout)`, or `fn(rollouts)` for all siblings of a group; plain or async. It returns a number or numbers by name for each."""


class Rewards:
    """Scorers and the weights of all components.

    `weights`: by component or by scorer; 1 if not given. A weight for "env" or "parser" scales what the env or the parser gave.
    `max_concurrent`: calls of `Scorer.score` at a time. `timeout_s`: for each of them.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer] = (),
        weights: Mapping[str, float] | None = None,
        *,
        max_concurrent: int = 64,
        timeout_s: float | None = 600.0,
    ) -> None:
        self.scorers = tuple(scorers)
        self.weights = dict(weights or {})
        self.max_concurrent, self.timeout_s = max_concurrent, timeout_s
        self._check()
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._own = {scorer.name: _given(scorer) for scorer in self.scorers}
        self._unsaved = UnsavedState(self._own.values())

    def state_dict(self) -> dict[str, Any]:
        """The states of scorers that have one, by name, as they are now: a source generates on from it later."""
        if self._places is not None:  # they have scored something
            self._unsaved.warn()
        return {name: deepcopy(own.state_dict()) for name, own in self._own.items() if is_saved(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in state.keys() & self._own.keys():
            load_into(self._own[name], state[name])

    def _check(self) -> None:
        names = [scorer.name for scorer in self.scorers]
        for name in names:
            if not name or "/" in name or name in OWN_COMPONENTS or names.count(name) > 1:
                raise ConfigError(
                    f"A scorer is named {name!r}; each needs another name without '/', and none of "
                    f"{', '.join(OWN_COMPONENTS)}, which are components of the rollout itself."
                )
        for name, weight in self.weights.items():
            if name.split("/")[0] not in (*names, *OWN_COMPONENTS):
                raise UnknownName.among("reward component", name, [*names, *OWN_COMPONENTS], "A weight needs one.")
            if not math.isfinite(weight):
                raise ConfigError(f"The weight of reward component {name!r} is {weight}; it must be finite.")
        if self.max_concurrent < 1:
            raise ConfigError(f"max_concurrent={self.max_concurrent}; at least one scorer must run at a time.")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s}; give a positive number of seconds, or None for no limit.")

    @property
    def compares_siblings(self) -> bool:
        """True if some scorer needs a whole group."""
        return any(scorer.by_group for scorer in self.scorers)

    @property
    def identity(self) -> dict[str, Any]:
        """Names and weights: a resumed run does not take over episodes that were scored with others."""
        return {"scorers": [scorer.name for scorer in self.scorers], "weights": self.weights}

    def metrics(self) -> dict[str, float]:
        """Metrics of the scorers themselves so far, such as the cost of a judge."""
        found: dict[str, float] = {}
        for scorer in self.scorers:
            if isinstance(scorer, ReportsMetrics):
                found |= scorer.metrics()
        return found

    def mean_weights(self) -> dict[str, float]:
        """Metric that is a mean -> the number of values it is over."""
        found: dict[str, float] = {}
        for scorer in self.scorers:
            if isinstance(scorer, ReportsMeans):
                found |= scorer.mean_weights()
        return found

    def weight_of(self, component: str) -> float:
        """The weight of a component, else that of its scorer, else 1."""
        return self.weights.get(component, self.weights.get(component.split("/")[0], 1.0))

    async def score_episode(self, rollouts: Sequence[Rollout]) -> None:
        """Weight the components of an episode, and add those of the scorers that need no siblings."""
        found = await self._scores([s for s in self.scorers if not s.by_group], _scored(rollouts))
        for rollout in rollouts:
            self._weight_own(rollout)
        self._add(found)

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Add the components of the scorers that compare siblings, which are those of one agent (`Rollout.group`)."""
        siblings: dict[Hashable, list[Rollout]] = {}
        for rollout in _scored(rollouts):
            siblings.setdefault(rollout.group or rollout.id, []).append(rollout)
        scorers = [scorer for scorer in self.scorers if scorer.by_group]
        for found in await all_or_none(self._scores(scorers, own) for own in siblings.values()):
            self._add(found)

    # --- calling scorers ---

    async def _scores(
        self, scorers: Sequence[Scorer], rollouts: Sequence[Rollout]
    ) -> list[tuple[Rollout, dict[str, float]]]:
        """The components of all scorers by rollout; nothing is added to a rollout before all are known."""
        if not rollouts:
            return []
        by_scorer = await all_or_none(self._call(scorer, rollouts) for scorer in scorers)
        merged: list[dict[str, float]] = [{} for _ in rollouts]
        for answers in by_scorer:
            for components, answer in zip(merged, answers, strict=True):
                components |= answer
        return list(zip(rollouts, merged, strict=True))

    async def _call(self, scorer: Scorer, rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        try:
            async with self._place():
                try:
                    async with asyncio.timeout(self.timeout_s) as limit:
                        answers = await scorer.score(rollouts)
                except TimeoutError as error:
                    if not limit.expired():
                        raise
                    raise TimeoutError(
                        f"The scorer {scorer.name!r} took longer than timeout_s={self.timeout_s:g} s."
                    ) from error
            return _checked(scorer, answers, len(rollouts))
        except Exception as error:
            error.add_note(f"Raised by the scorer {scorer.name!r}.")
            raise

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:  # a second `train_sync` has another loop
            self._places = (loop, asyncio.Semaphore(self.max_concurrent))
        return self._places[1]

    # --- changing rollouts ---

    def _weight_own(self, rollout: Rollout) -> None:
        for number, step in enumerate(rollout.steps):
            raw = {name: value for name, value in own_scores(step).items() if self.weight_of(name) != 1}
            if raw:
                rollout.steps[number] = self._with(step, raw)

    def _add(self, found: Sequence[tuple[Rollout, dict[str, float]]]) -> None:
        for rollout, components in found:
            if components:
                number = _last_that_counts(rollout)
                rollout.steps[number] = self._with(rollout.steps[number], components)

    def _with(self, step: Step, values: Mapping[str, float]) -> Step:
        """The step with these components, given before their weights."""
        weighted = {name: self.weight_of(name) * value for name, value in values.items()}
        components = {**components_of(step), **weighted}
        info = {**step.info, SCORES: {**step.info.get(SCORES, {}), **values}}
        return replace(step, reward=sum(components.values()), reward_components=components, info=info)


def remove_scores(rollout: Rollout) -> None:
    """Undo `Rewards`: leave the components of the rollout itself, without weights."""
    for number, step in enumerate(rollout.steps):
        if SCORES in step.info:
            own = own_scores(step)
            info = {name: value for name, value in step.info.items() if name != SCORES}
            rollout.steps[number] = replace(step, reward=sum(own.values()), reward_components=own, info=info)


def _scored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts that scorers see: not failed ones, sub-tasks and threads (they count through another rollout), and not those
    of an agent that never acted."""
    return [r for r in rollouts if r.failure is None and not r.is_sub_task and r.steps]


def _last_that_counts(rollout: Rollout) -> int:
    """The position of the last step whose reward is part of `Rollout.total_reward`.

    A rollout without one (it ran out of tokens while it used its tools) gets an env step in the turn of its last model call.
    """
    for number in reversed(range(len(rollout.steps))):
        step = rollout.steps[number]
        if step.kind == "env" or is_parse_failure(step):
            return number
    call = rollout.steps[-1]
    number = len(rollout.steps)
    rollout.steps.append(
        EnvironmentStep(
            index=number,
            prev_obs=None,
            action=call.action,
            parsed_action=None,
            next_obs=None,
            source_agent_step_id=call.id,
            agent_step_ids=[call.id],
            reward=0.0,
            truncated=call.truncated,
            terminated=call.terminated,
            trace=call.trace,
            reward_components={"env": 0.0},
            id=f"{rollout.id}.{number}",
            turn_id=call.turn_id,
            parent_id=call.id,
        )
    )
    return number


def _checked(scorer: Scorer, answers: Any, num_rollouts: int) -> list[dict[str, float]]:
    if not isinstance(answers, Sequence) or len(answers) != num_rollouts:
        raise ScorerContractError(
            f"The scorer {scorer.name!r} was given {num_rollouts} rollouts and returned {_shown(answers)}; it must return a list "
            "with one mapping of components per rollout."
        )
    return [{name: _number(scorer, name, value) for name, value in _items(scorer, answer)} for answer in answers]


def _items(scorer: Scorer, answer: Any) -> list[tuple[str, Any]]:
    if not isinstance(answer, Mapping):
        raise ScorerContractError(
            f"The scorer {scorer.name!r} returned {_shown(answer)} for a rollout; it must return components by name, such as "
            f"{{{scorer.name!r}: 0.5}}."
        )
    for name in answer:
        if name != scorer.name and not str(name).startswith(f"{scorer.name}/"):
            raise ScorerContractError(
                f"The scorer {scorer.name!r} returned a component named {name!r}; its components are called "
                f"{scorer.name!r} or '{scorer.name}/…'."
            )
    return list(answer.items())


def _number(scorer: Scorer, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:  # NaN too
        raise ScorerContractError(
            f"The scorer {scorer.name!r} returned {_shown(value)} as {name!r}; a reward is a finite number of at most "
            f"{MAX_REWARD:g}."
        )
    return number


def _shown(value: Any) -> str:
    return f"{value!r:.200} ({type(value).__name__})"


# --- reward functions ---


class FunctionScorer:
    """A scorer from a function of a rollout, or of the rollouts of a group if its first parameter is called `rollouts`.

    A plain function runs in a thread, so that a slow one does not stop the other episodes.
    """

    def __init__(self, fn: RewardFunction, name: str | None = None) -> None:
        self.fn = fn
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        signature = inspect.signature(fn)
        try:
            signature.bind(None)
        except TypeError as error:
            raise ConfigError(
                f"The reward function {self.name!r} is called with one argument, the rollout or the group's `rollouts`, but takes "
                f"{signature}: {error}. (task, answer, session) is for an agent that is a function or a command (docs/gateway.md)."
            ) from error
        self.by_group = next(iter(signature.parameters), None) == "rollouts"
        while isinstance(fn, partial):
            fn = fn.func
        self._is_async = inspect.iscoroutinefunction(fn if inspect.isroutine(fn) else type(fn).__call__)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        if not self.by_group:
            return [self._named(await self._call(rollout)) for rollout in rollouts]
        answers = await self._call(rollouts)
        if not isinstance(answers, Sequence) or isinstance(answers, str):
            raise ScorerContractError(
                f"The reward function {self.name!r} takes `rollouts` and returned {_shown(answers)}; it must return a list with "
                "one reward per rollout."
            )
        return [self._named(answer) for answer in answers]

    async def _call(self, argument: Any) -> Any:
        answer: Awaitable[Any] = self.fn(argument) if self._is_async else asyncio.to_thread(self.fn, argument)
        return await answer

    def _named(self, answer: Any) -> Mapping[str, float]:
        if isinstance(answer, Mapping):
            return {f"{self.name}/{name}": value for name, value in answer.items()}
        return {self.name: answer}


class RenamedScorer:
    """A scorer under another name: its components and metrics begin with that."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self.scorer, self.name, self.by_group = scorer, name, scorer.by_group

    async def score(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, float]]:
        answers = _checked(self.scorer, await self.scorer.score(rollouts), len(rollouts))
        return [self._renamed(answer) for answer in answers]

    def metrics(self) -> dict[str, float]:
        return self._renamed(self.scorer.metrics()) if isinstance(self.scorer, ReportsMetrics) else {}

    def mean_weights(self) -> dict[str, float]:
        return self._renamed(self.scorer.mean_weights()) if isinstance(self.scorer, ReportsMeans) else {}

    def _renamed(self, values: Mapping[str, float]) -> dict[str, float]:
        first = self.scorer.name
        return {
            self.name + key.removeprefix(first) if key == first or key.startswith(f"{first}/") else key: value
            for key, value in values.items()
        }


def _given(scorer: Scorer) -> Any:
    """The user's object in a scorer."""
    if isinstance(scorer, RenamedScorer):
        return _given(scorer.scorer)
    return scorer.fn if isinstance(scorer, FunctionScorer) else scorer


def as_scorer(given: Scorer | RewardFunction, name: str | None = None) -> Scorer:
    """A scorer as it is, or a function as a scorer called `name`."""
    if isinstance(given, Scorer):
        if name not in (None, given.name):
            raise ConfigError(f"The scorer {given.name!r} was given the name {name!r}; change it where it is made.")
        return given
    if isinstance(given, type) or not callable(given):
        raise ConfigError(
            f"{_shown(given)} is neither a reward function nor a scorer; give a function of a rollout, or an object "
            "with name, by_group and score."
        )
    return FunctionScorer(given, name)
