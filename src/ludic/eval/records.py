"""One record per reply that was meant for the env: what reducers read, and what stands in records.jsonl.

Shaped like the meta of a training sample, so one reducer serves both. A reply that could not be read has a record like one
that could, and an episode that failed before its first reply has one too: whatever is averaged over records or rollouts is
averaged over all of them.
"""

from collections.abc import Sequence
from typing import Any

from ludic.batch_gen.stitching import seeds_of, small_facts
from ludic.eval.outcome import Outcome
from ludic.types import AgentStep, EnvironmentStep, Rollout, Step, is_parse_failure


def step_records(rollout: Rollout, outcome: Outcome) -> list[dict[str, Any]]:
    """The records of one rollout, in order; at least one."""
    of_rollout = _rollout_facts(rollout, outcome)
    calls = {step.id: step for step in [*rollout.agent_steps, *rollout.sampling_steps]}
    shown: list[Step] = [step for step in rollout.steps if step.kind == "env" or is_parse_failure(step)]
    records = [{**small_facts(step), **of_rollout, **_step_facts(step, calls)} for step in shown]
    return records or [{**of_rollout, "step_index": None, "step_kind": None, "reward": 0.0, "parse_error": False}]


def _rollout_facts(rollout: Rollout, outcome: Outcome) -> dict[str, Any]:
    meta = rollout.meta
    return {
        "rollout_id": rollout.id,
        "task": outcome.task,
        "group_id": meta.get("request_meta", {}).get("group_id"),
        "agent_id": meta.get("agent_id"),
        "env_name": meta.get("env_name"),
        **seeds_of(rollout),
        "episode_idx": meta.get("episode_idx"),
        "num_turns": outcome.num_turns,
        "total_reward": outcome.total_reward,
        "env_reward": outcome.reward,
        "episode_correct": outcome.correct,
        "episode_truncated": outcome.is_truncated,
        "stop": None if rollout.stop is None else rollout.stop.value,
        "failed": outcome.failure is not None,
        "failure": outcome.failure,
        "request_meta": meta.get("request_meta", {}),
    }


def _step_facts(step: Step, calls: dict[str, Step]) -> dict[str, Any]:
    of_turn = [] if isinstance(step, AgentStep) else [calls[i] for i in step.agent_step_ids if i in calls]
    made = [step] if step.id in calls else of_turn
    trace = step.trace
    return {
        "step_index": step.index,
        "step_kind": step.kind,
        "reward": step.reward,
        "action": step.action,
        "parsed_action": step.parsed_action if isinstance(step, EnvironmentStep) else None,
        "truncated": step.truncated,
        "terminated": step.terminated,
        "parse_error": isinstance(step, AgentStep),
        "finish_reason": None if trace is None else trace.finish_reason,
        "prompt_length": 0 if trace is None else len(trace.prompt_token_ids),
        "completion_length": sum(len(call.trace.completion_token_ids) for call in made if call.trace is not None),
    }


def all_records(rollouts: Sequence[Rollout], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Of the rollouts that have an outcome; delegated sub-tasks have none."""
    by_id = {outcome.rollout_id: outcome for outcome in outcomes}
    return [record for r in rollouts if r.id in by_id for record in step_records(r, by_id[r.id])]
