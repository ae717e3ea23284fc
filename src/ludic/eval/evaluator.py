"""Playing evaluation episodes: `run_eval` once, `EngineEvaluator` whenever a trainer asks.

Every evaluation numbers its episodes from 0, so requests without seeds of their own get the same ones each time: versions of
a policy are compared on the same tasks.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from ludic.batch_gen import RequestsFn, RolloutEngine
from ludic.eval.report import EvalReport, Grading, make_report
from ludic.types import Evaluator, Reducer, Rollout, RolloutRequest, TakesSnapshots

EvalResult = tuple[list[dict[str, Any]], dict[str, float]]
"""(records, metrics)."""
OnRollouts = Callable[[list[Rollout]], None]
"""Told the rollouts of each episode as it finishes: for a running mean beside the engine's own progress."""


async def evaluate(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    *,
    grading: Grading | None = None,
    reducers: Mapping[str, Reducer] | None = None,
    max_steps: int = 1,
    timeout_s: float | None = None,
    concurrency: int = 8,
    on_rollouts: OnRollouts | None = None,
) -> EvalReport:
    """Play the requests and report. `max_steps` is turns per episode, `timeout_s` seconds per model call."""
    playing = engine.stream_episodes(
        requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency, first_index=0
    )
    episodes = []
    async with aclosing(playing):
        async for episode in playing:
            episodes.append(episode)
            if on_rollouts is not None:
                on_rollouts(episode.rollouts)
    episodes.sort(key=lambda episode: episode.plan.index)
    rollouts = [rollout for episode in episodes for rollout in episode.rollouts]
    return await asyncio.to_thread(make_report, rollouts, grading, reducers)


async def run_eval(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    *,
    reducers: Mapping[str, Reducer] | None = None,
    max_steps: int = 1,
    timeout_s: float | None = None,
    concurrency: int = 8,
    grading: Grading | None = None,
) -> EvalResult:
    """(one record per reply that was meant for the env, metrics)."""
    report = await evaluate(
        engine,
        requests,
        grading=grading,
        reducers=reducers,
        max_steps=max_steps,
        timeout_s=timeout_s,
        concurrency=concurrency,
    )
    return report.records, report.metrics


def run_eval_sync(engine: RolloutEngine, requests: Sequence[RolloutRequest], **settings: Any) -> EvalResult:
    """The same without asyncio. Where an event loop runs already, as in a notebook, it gets a thread with its own."""
    work = run_eval(engine, requests, **settings)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


class EngineEvaluator:
    """Evaluates with a RolloutEngine; what a call does not say is as it was set here."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests_fn: RequestsFn,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int = 1,
        timeout_s: float | None = None,
        concurrency: int = 32,
        *,
        grading: Grading | None = None,
    ) -> None:
        """`requests_fn` is asked at every evaluation; one that returns the same requests compares like with like."""
        self._engine = engine
        self._requests_fn = requests_fn
        self._reducers = reducers
        self._max_steps = max_steps
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._grading = grading
        self.last_report: EvalReport | None = None
        """Of the newest evaluation: estimates, outcomes, rollouts."""

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> EvalResult:
        report = await evaluate(
            self._engine,
            self._requests_fn() if requests is None else requests,
            reducers=self._reducers if reducers is None else reducers,
            max_steps=self._max_steps if max_steps is None else max_steps,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            concurrency=self._concurrency if concurrency is None else concurrency,
            grading=self._grading,
        )
        self.last_report = report
        return report.records, report.metrics


class SnapshotEvaluator:
    """An evaluator whose agents talk to a snapshot of the policy, so that training may go on meanwhile."""

    def __init__(self, evaluator: Evaluator, snapshot: TakesSnapshots) -> None:
        """`snapshot`: whom the evaluator's agents talk to, such as `ludic.inference.local.snapshot.EngineSnapshot`."""
        self._evaluator = evaluator
        self._snapshot = snapshot

    def take_snapshot(self, version: int) -> None:
        """The weights of now; a trainer calls it before each evaluation."""
        self._snapshot.take_snapshot(version)

    async def eval(self, **settings: Any) -> EvalResult:
        return await self._evaluator.eval(**settings)
