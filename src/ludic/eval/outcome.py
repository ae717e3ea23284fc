"""The outcome of a rollout: correct or not, its reward, its answer, and its errors.

Every rollout counts. An unparseable reply, a truncated episode and a failed episode are samples like any other; everything that
is not correct is wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.batch_gen.stitching import small_facts
from ludic.types import AgentStep, EnvironmentStep, Rollout, Step, StopReason, is_parse_failure, was_rejected_as_cut_off
from ludic.types.steps import own_scores

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"([+-]?)0*(?=[\d.]*\d)(\d*)(?:\.(\d*?)0*)?", re.ASCII)
_LONGEST_NUMBER = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One sample of one task."""

    rollout_id: str
    task: str
    """Key of the task; samples of one task share it."""
    episode: str
    """Key of the episode; roles of one episode share it."""
    role: str | None
    """The agent's id in the env; None where the episode failed before it had one."""
    correct: bool | None
    """None: neither the env nor a success threshold defines it."""
    reward: float
    """Reward of the env over the episode, without the parser's format rewards and penalties."""
    total_reward: float
    """Reward with those of the parser and of scorers, with their weights."""
    answer: str | None
    """The vote in majority@k; None if the last reply could not be parsed."""
    has_parse_error: bool
    """Some reply could not be parsed, or was cut off."""
    has_unreadable_reply: bool
    """Some complete reply could not be parsed."""
    has_cut_off_reply: bool
    """Some reply ran out of tokens and was not parsed."""
    is_truncated: bool
    """A limit ended the episode: turns, context, tokens of the last reply. An unparseable last reply does not count."""
    failure: str | None
    """Why the episode failed."""
    result: str | None
    """Result of a game ("win", "draw", "loss"), if the env reports it."""
    illegal_move: bool | None
    """Some move was illegal; None if the env does not report it."""
    num_turns: int
    num_completion_tokens: int
    scores: dict[str, float] = field(default_factory=dict)
    """Components by name, before their weights: env, parser, and those of scorers."""


def outcome_of(rollout: Rollout, *, success_reward: float | None = 1.0) -> Outcome:
    """Correct means `info["correct"]` of the env, or else an env reward of at least `success_reward`."""
    env_steps = rollout.env_steps
    reward = sum(_env_reward(step) for step in env_steps)
    last = rollout.steps[-1] if rollout.steps else None
    facts = env_steps[-1].info if env_steps else {}
    unread = [step for step in rollout.steps if is_parse_failure(step)]
    # Env steps that hold the tokens of model calls which are not steps of the rollout.
    hidden_calls: list[Step] = [step for step in rollout.sampling_steps if isinstance(step, EnvironmentStep)]
    illegal = [bool(step.info["illegal_move"]) for step in env_steps if "illegal_move" in step.info]
    return Outcome(
        rollout_id=rollout.id,
        task=_task_of(rollout),
        episode=rollout.episode_run or rollout.id,
        role=rollout.agent_id,
        correct=_is_correct(rollout, facts, reward, success_reward),
        reward=reward,
        total_reward=rollout.total_reward,
        answer=_answer(last),
        has_parse_error=bool(unread),
        has_unreadable_reply=any(not was_rejected_as_cut_off(step) for step in unread),
        has_cut_off_reply=any(map(was_rejected_as_cut_off, unread)),
        is_truncated=_is_truncated(rollout, last),
        failure=None if rollout.failure is None else f"{rollout.failure.error}: {rollout.failure.message}",
        result=facts["result"] if isinstance(facts.get("result"), str) else None,
        illegal_move=any(illegal) if illegal else None,
        num_turns=len(rollout.turns()),
        num_completion_tokens=sum(map(_num_sampled, [*rollout.agent_steps, *hidden_calls])),
        scores=rollout.scores,
    )


def outcomes_of(rollouts: Sequence[Rollout], *, success_reward: float | None = 1.0) -> list[Outcome]:
    """Outcomes of all rollouts except delegated sub-tasks, which count through their parents.

    If any rollout is graded, ungraded ones (no parseable reply reached the env) are wrong. If no reply of any rollout could be
    parsed, the env had nothing to grade, and all are wrong.
    """
    own = [r for r in rollouts if not r.is_sub_task]
    found = [outcome_of(r, success_reward=success_reward) for r in own]
    is_unread = any(outcome.has_parse_error for outcome in found) and not any(r.env_steps for r in own)
    if all(outcome.correct is None for outcome in found) and not is_unread:
        return found
    return [replace(outcome, correct=bool(outcome.correct)) for outcome in found]


def _env_reward(step: EnvironmentStep) -> float:
    """The env's reward before weights; in a step without the env's component, all that no scorer added."""
    own = own_scores(step)
    return own.get("env", sum(own.values()))


def _task_of(rollout: Rollout) -> str:
    """The request's `task_id` if its meta has one, else env, sample and env seed."""
    meta = rollout.meta
    if "task_id" in meta:
        return str(meta["task_id"])
    sample, seed = meta.get("sample_index"), rollout.env_seed
    if sample is None and seed is None:
        return rollout.id
    return f"{rollout.engine_facts.get('env_kind', rollout.env_name)}:{sample}:{seed}"


def canonical(answer: str) -> str:
    """Normal form of an answer: ignores case, spaces, $ and %, thousands separators and trailing zeros (18.0 is 18)."""
    text = " ".join(answer.split()).casefold().strip("$ ").rstrip(".$ ")
    text = _THOUSANDS.sub("", text).removesuffix("%").removesuffix("\\").strip()
    number = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if number is None:
        return text
    sign, whole, fraction = number.groups()
    value = (whole or "0") + (f".{fraction}" if fraction else "")
    return f"-{value}" if sign == "-" and value != "0" else value


def _is_correct(rollout: Rollout, facts: dict[str, Any], reward: float, success_reward: float | None) -> bool | None:
    if rollout.failure is None and isinstance(facts.get("correct"), bool):
        return bool(facts["correct"])
    if success_reward is None:
        return None
    # Rewards are often sums of parts such as 0.1, so allow for rounding.
    return rollout.failure is None and reward >= success_reward - 1e-9


def _num_sampled(step: Step) -> int:
    """The server's count if it reports one (a text endpoint, whose tokens are not in the trace), else the trace's."""
    counted = step.info.get("completion_tokens")
    return counted if isinstance(counted, int) else len(step.trace.completion_token_ids) if step.trace else 0


def _answer(last: Step | None) -> str | None:
    if not isinstance(last, EnvironmentStep):
        return None
    answer = last.info.get("parsed_answer", last.parsed_action)
    return None if answer is None else canonical(str(answer))


def _is_truncated(rollout: Rollout, last: Step | None) -> bool:
    if rollout.stop in (StopReason.MAX_STEPS, StopReason.PARSE_ERROR) and last is not None and is_parse_failure(last):
        return was_rejected_as_cut_off(last)
    return rollout.stop is not None and rollout.stop.is_truncation


def step_records(rollout: Rollout, outcome: Outcome) -> list[dict[str, Any]]:
    """The records of one rollout for reducers and records.jsonl: one per reply to the env, in order; at least one.

    They are shaped like the meta of a training sample, so that one reducer serves both. Unparseable replies have a record, and
    so does an episode that failed before its first reply: averages over records or rollouts include all of them.
    """
    of_rollout = _rollout_facts(rollout, outcome)
    calls = {step.id: step for step in [*rollout.agent_steps, *rollout.sampling_steps]}
    shown: list[Step] = [step for step in rollout.steps if step.kind == "env" or is_parse_failure(step)]
    records = [{**small_facts(step), **of_rollout, **_step_facts(step, calls)} for step in shown]
    return records or [{**of_rollout, "step_index": None, "step_kind": None, "reward": 0.0, "parse_error": False}]


def _rollout_facts(rollout: Rollout, outcome: Outcome) -> dict[str, Any]:
    return {
        "rollout_id": rollout.id,
        "task": outcome.task,
        "group_id": rollout.group_id,
        "agent_id": rollout.agent_id,
        "env_name": rollout.env_name,
        "env_seed": rollout.env_seed,
        "sampling_seed": rollout.sampling_seed,
        "episode_idx": rollout.meta.get("episode_idx"),
        "num_turns": outcome.num_turns,
        "total_reward": outcome.total_reward,
        "env_reward": outcome.reward,
        "episode_correct": outcome.correct,
        "episode_truncated": outcome.is_truncated,
        "stop": None if rollout.stop is None else rollout.stop.value,
        "failed": outcome.failure is not None,
        "failure": outcome.failure,
        "request_meta": rollout.request_meta,
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
