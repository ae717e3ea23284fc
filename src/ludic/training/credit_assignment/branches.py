"""Branches of an episode under its outcome (FoldGRPO, arXiv 2510.11967): a sub-task is credited as the episode that started it.

A parent that hands work to sub-agents (`DelegatingProtocol`) sees their answers only, so its own context stays short. Their
rollouts earn nothing by themselves: what they are worth shows in the parent's reward, and in process rewards of single turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ludic.training.credit_assignment.grouping import EPS, GroupRule, Weights, finished, one_per_turn
from ludic.types import AgentStep, ConfigError, Rollout, Step, is_parse_failure, spread_of

ProcessFn: TypeAlias = Callable[[Rollout], Mapping[int, float]]
"""A rollout, of a parent or a branch → process rewards by the step's index."""


def _no_process(rollout: Rollout) -> Mapping[int, float]:
    return {}


@dataclass(frozen=True, slots=True)
class FoldedReturn(GroupRule):
    """(clip(R + Q_t, low, high) − mean R) / std R: R of the whole episode, Q_t the process rewards of the turn.

    Mean and deviation are those of the group's parents, without process rewards. Where all earned the same, the difference is
    not divided, so process rewards still count. An outcome beyond the bounds moves them: it is not
    clipped itself. Branches of a failed parent get 0.
    """

    process: ProcessFn = field(default=_no_process, kw_only=True)
    low: float = field(default=0.0, kw_only=True)
    high: float = field(default=1.0, kw_only=True)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        branches: dict[str | None, list[Rollout]] = {}
        for rollout in kept:
            if rollout.is_sub_task:
                branches.setdefault(rollout.episode_run, []).append(rollout)
        weights: Weights = {
            (rollout.id, step.index): 0.0 for own in branches.values() for rollout in own for step in rollout.steps
        }
        for members in self._groups([rollout for rollout in kept if not rollout.is_sub_task]):
            totals = np.array([member.total_reward for member in members], dtype=np.float64)
            spread = spread_of(totals, [step.reward for member in members for step in member.steps])
            for member, total in zip(members, totals, strict=True):
                run = member.episode_run
                for rollout in [member, *(branches.get(run, []) if run is not None else [])]:
                    given = self.process(rollout)
                    process_T = np.array([sum(given.get(s.index, 0.0) for s in turn.steps) for turn in rollout.turns()])
                    advantage_T = (
                        np.clip(total + process_T, min(self.low, total), max(self.high, total)) - totals.mean()
                    )
                    weights |= one_per_turn([rollout], [advantage_T / (spread + EPS) if spread else advantage_T])
        return weights


def fold_penalties(
    *,
    max_main_tokens: int | None = None,
    unfolded: float = 1.0,
    failed_call: float = 1.0,
    scope: ProcessFn = _no_process,
) -> ProcessFn:
    """FoldGRPO's process rewards: minus `unfolded` for a parent's call whose prompt and reply are longer than `max_main_tokens`
    and that starts no branch, minus `failed_call` for a call that cannot be read or whose tool fails, and what `scope` says of a
    branch (0.2 less for one that leaves its task, by a judge)."""
    if unfolded < 0 or failed_call < 0 or (max_main_tokens is not None and max_main_tokens < 1):
        raise ConfigError(
            f"fold_penalties(max_main_tokens={max_main_tokens}, unfolded={unfolded}, failed_call={failed_call}): a length is at "
            "least 1, and penalties are given as numbers above 0."
        )

    def process(rollout: Rollout) -> Mapping[int, float]:
        found = dict(scope(rollout)) if rollout.is_sub_task else {}
        for step in rollout.agent_steps:
            cost = failed_call * _fails(step)
            if max_main_tokens is not None and not rollout.is_sub_task and not _is_of_branch(step):
                cost += unfolded * (_num_tokens(step) > max_main_tokens)
            if cost:
                found[step.index] = found.get(step.index, 0.0) - cost
        return found

    return process


def _fails(step: AgentStep) -> bool:
    return is_parse_failure(step) or any(result.get("is_error") for result in step.tool_results or ())


def _is_of_branch(step: AgentStep) -> bool:
    """Starts one, by a call that the protocol or the agent answers, or is in one (`BranchingAgent`)."""
    names = {call["function"]["name"] for call in step.tool_calls or ()}
    return step.action_target == "external" or "branch" in names or "branch" in step.info


def _num_tokens(step: Step) -> int:
    return 0 if step.trace is None else len(step.trace.prompt_token_ids) + len(step.trace.completion_token_ids)
