"""Runs evaluation episodes: `run_eval` once, `EngineEvaluator` on a trainer's request.

Every evaluation numbers its episodes from 0, so requests without seeds get the same seeds each time: all versions of a policy
are compared on the same tasks.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ludic.batch_gen import RequestsFn, RolloutEngine
from ludic.batch_gen.episodes import Episode
from ludic.eval.report import EvalReport, Grading, make_report
from ludic.types import Evaluator, Reducer, Rollout, RolloutRequest, TakesSnapshots

EvalResult = tuple[list[dict[str, Any]], dict[str, float]]
"""(records, metrics)."""
OnRollouts = Callable[[list[Rollout]], None]
"""Called with the rollouts of each finished episode, for a running mean."""


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
    without: str = "",
) -> EvalReport:
    """Run the requests and report. `max_steps` is turns per episode, `timeout_s` seconds per model call; rollouts of the policy
    `without` do not count."""
    episodes = await _play_requests(
        engine, requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency, on_rollouts=on_rollouts
    )
    rollouts = [rollout for episode in episodes for rollout in episode.rollouts if rollout.policy != without]
    return await asyncio.to_thread(make_report, rollouts, grading, reducers)


async def _play_requests(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    *,
    max_steps: int = 1,
    timeout_s: float | None = None,
    concurrency: int = 8,
    on_rollouts: OnRollouts | None = None,
) -> list[Episode]:
    """The episodes of an evaluation, in the order of the requests."""
    stream = engine.stream_episodes(
        requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency, first_index=0
    )
    episodes = []
    async with aclosing(stream):
        async for episode in stream:
            episodes.append(episode)
            if on_rollouts is not None:
                on_rollouts(episode.rollouts)
    return sorted(episodes, key=lambda episode: episode.plan.index)


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
    """(one record per reply to the env, metrics)."""
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
    """`run_eval` without asyncio. Inside a running event loop, as in a notebook, it uses a thread with its own loop."""
    work = run_eval(engine, requests, **settings)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


class EngineEvaluator:
    """Evaluates with a RolloutEngine; arguments of `eval` override those of the constructor."""

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
        """`requests_fn` is called at every evaluation; return the same requests to compare versions on the same tasks."""
        self._engine, self._requests_fn = engine, requests_fn
        self._settings: dict[str, Any] = {
            "reducers": reducers, "max_steps": max_steps, "timeout_s": timeout_s, "concurrency": concurrency, "grading": grading,
        }  # fmt: skip
        self.last_report: EvalReport | None = None
        """Estimates, outcomes and rollouts of the last evaluation."""

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> EvalResult:
        given = {"reducers": reducers, "max_steps": max_steps, "timeout_s": timeout_s, "concurrency": concurrency}
        settings = self._settings | {name: value for name, value in given.items() if value is not None}
        return await self._play(self._requests_fn() if requests is None else requests, **settings)

    async def _play(self, requests: Sequence[RolloutRequest], **settings: Any) -> EvalResult:
        report = self.last_report = await evaluate(self._engine, requests, **settings)
        return report.records, report.metrics


class SnapshotEvaluator:
    """An evaluator on a snapshot of the policy, so that training continues meanwhile."""

    def __init__(self, evaluator: Evaluator, snapshot: TakesSnapshots) -> None:
        """`snapshot`: the client of the evaluator's agents, such as `ludic.inference.local.snapshot.EngineSnapshot`."""
        self._evaluator, self._snapshot = evaluator, snapshot

    def take_snapshot(self, version: int) -> None:
        """Copy the current weights; a trainer calls it before each evaluation."""
        self._snapshot.take_snapshot(version)

    async def eval(self, **settings: Any) -> EvalResult:
        return await self._evaluator.eval(**settings)


class PolicyEvaluator(EngineEvaluator):
    """Plays requests that say which policy has which role (`assign_roles`), and reports by policy and by role.

    Metrics are `ann/mean_reward`, and `ann/X/mean_reward` where ann plays several roles.
    """

    last_reports: Mapping[str, EvalReport] = MappingProxyType({})
    """Reports of the last evaluation, by policy or policy/role. `last_report` stays None."""

    async def _play(
        self,
        requests: Sequence[RolloutRequest],
        *,
        grading: Grading | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        **settings: Any,
    ) -> EvalResult:
        episodes = await _play_requests(self._engine, requests, **settings)
        reports = self.last_reports = await asyncio.to_thread(report_policies, episodes, grading, reducers)
        records = [record for name, report in reports.items() if "/" not in name for record in report.records]
        return records, {f"{name}/{key}": value for name, own in reports.items() for key, value in own.metrics.items()}


def report_policies(
    episodes: Sequence[Episode], grading: Grading | None = None, reducers: Mapping[str, Reducer] | None = None
) -> dict[str, EvalReport]:
    """Reports by policy, and by policy/role of a policy with several roles."""
    grading = grading or Grading()
    seats: dict[str, dict[str, list[Rollout]]] = defaultdict(lambda: defaultdict(list))
    meeting_itself: set[str] = set()
    for episode in episodes:
        assigned = episode.plan.request.protocol.kwargs["policies"]
        meeting_itself |= {policy for policy, num_roles in Counter(assigned.values()).items() if num_roles > 1}
        for role, policy in assigned.items():
            seats[policy][role] += _rollouts_of(episode, role)
    reports: dict[str, EvalReport] = {}
    for policy, by_role in sorted(seats.items()):
        found = {role: rollouts for role, rollouts in sorted(by_role.items()) if rollouts}
        together = [rollout for rollouts in found.values() for rollout in rollouts]
        if not together:
            continue  # its turn came in no episode
        # Two roles of one episode are no two attempts at a task.
        is_mixed = len(found) > 1 and policy in meeting_itself
        whole = replace(grading, pass_k=(), majority_k=()) if is_mixed else grading
        reports[policy] = make_report(together, whole, reducers)
        if len(found) > 1:
            reports |= {f"{policy}/{role}": make_report(own, grading, reducers) for role, own in found.items()}
    return reports


def _rollouts_of(episode: Episode, role: str) -> list[Rollout]:
    """The role's rollout with those of its sub-agents; of an episode that failed before the role had one, the failed one."""
    own = [rollout for rollout in episode.rollouts if rollout.agent_id == role]
    return own or [rollout for rollout in episode.rollouts if rollout.agent_id is None and rollout.failure is not None]
