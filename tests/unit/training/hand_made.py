"""Rollouts and samples put together by hand, for tests of credit rules, filters and preprocess hooks."""

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.types import (
    AgentStep,
    EnvironmentStep,
    Rollout,
    SampleAttachments,
    SAWItem,
    Step,
    StopReason,
    TokenTrace,
)
from ludic.types.steps import new_id
from tests.origins import meta_and_origin

TRACE = TokenTrace([1, 2], [3], [-0.5])


def agent_step(index: int, *, turn: str | None, reward: float = 0.0, **facts: Any) -> AgentStep:
    return AgentStep(index=index, prompt_messages=[], action="a", trace=TRACE, reward=reward, turn_id=turn, **facts)


def env_step(index: int, *, turn: str | None, reward: float, **facts: Any) -> EnvironmentStep:
    return EnvironmentStep(
        index=index, prev_obs="o", action="a", parsed_action="a", next_obs="o", source_agent_step_id=None,
        agent_step_ids=[], reward=reward, trace=TRACE, turn_id=turn, **facts,
    )  # fmt: skip


def rollout(
    rewards: Sequence[float],
    *,
    group: str | None = "g",
    agent_id: str = "agent_0",
    calls: int = 1,
    stop: StopReason = StopReason.TERMINATED,
    **meta: Any,
) -> Rollout:
    """One turn per reward: `calls` model calls and an env step that earns it."""
    steps: list[Step] = []
    for t, reward in enumerate(rewards):
        for call in range(calls):
            target = "env" if call == calls - 1 else "internal"
            steps.append(agent_step(len(steps), turn=f"t{t}", action_target=target, loop_index=call))
        steps.append(env_step(len(steps), turn=f"t{t}", reward=reward))
    request_meta = {} if group is None else {"group_id": group}
    return Rollout(steps=steps, stop=stop, meta={"agent_id": agent_id, "request_meta": request_meta, **meta})


def session(
    reward: float,
    *threads: Sequence[int],
    group: str | None = "g",
    run: str | None = None,
    policy: str = "p",
    call_rewards: Mapping[int, float] | None = None,
    ends_at: int = 1_000,
    stop: StopReason = StopReason.TERMINATED,
    agent_id: str = "agent_0",
) -> list[Rollout]:
    """An agent's session as the gateway records it: one rollout per thread, one call per time. The first thread is the main one
    and ends with the session's reward; `call_rewards` are by the call's time."""
    run = run if run is not None else new_id()
    meta = {"agent_id": agent_id, "model": policy, "engine": {"episode_run": run}, "request_meta": {"group_id": group}}
    found = []
    for number, times in enumerate(threads or ((0,),)):
        steps: list[Step] = []
        for time in times:
            steps.append(agent_step(len(steps), turn=f"t{time}", ts_ns=time))
            if (earned := (call_rewards or {}).get(time)) is not None:
                steps.append(env_step(len(steps), turn=f"t{time}", reward=earned, ts_ns=ends_at))
        if number == 0:
            steps.append(env_step(len(steps), turn=f"t{times[-1]}", reward=reward, ts_ns=ends_at, terminated=True))
        link = {"thread": number, "delegate": "thread", "parent_step_id": None} if number else {}
        found.append(Rollout(steps=steps, stop=stop, meta={**meta, **link}))
    return found


def failed(group: str = "g") -> Rollout:
    broken = Rollout.failed(RuntimeError("tool bug"), meta={"request_meta": {"group_id": group}})
    broken.steps.append(agent_step(0, turn="t0", reward=100.0))
    return broken


def turn_weights(weights: dict[tuple[str, int], float], of: Rollout) -> list[float]:
    """One weight per turn, having checked that all steps of a turn have the same."""
    by_turn: dict[str | None, list[float]] = {}
    for step in of.steps:
        by_turn.setdefault(step.turn_id, []).append(weights[(of.id, step.index)])
    assert all(len(set(values)) == 1 for values in by_turn.values()), by_turn
    return [values[0] for values in by_turn.values()]


def item(
    weight: float = 1.0, *, token_weights: Sequence[float] | None = None, logps: Any = None, **facts: Any
) -> SAWItem:
    """One state token and as many action tokens as there are token weights (else two)."""
    num_actions = 2 if token_weights is None else len(token_weights)
    attached = SampleAttachments(token_weights=token_weights, actor_logps=logps)  # type: ignore[arg-type]
    ids, mask = [9] * (1 + num_actions), [0] + [1] * num_actions
    return SAWItem(ids, None, mask, weight, attachments=attached, **meta_and_origin(**facts))  # type: ignore[arg-type]
