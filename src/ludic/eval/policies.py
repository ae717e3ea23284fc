"""Evaluates policies that play together: a report for each of them, and for each of its roles where it has several."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ludic.batch_gen.episodes import Episode
from ludic.eval.evaluator import EngineEvaluator, EvalResult, play_requests
from ludic.eval.report import EvalReport, Grading, make_report
from ludic.types import Reducer, Rollout, RolloutRequest


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
        episodes = await play_requests(self._engine, requests, **settings)
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
