"""Rollouts of the calls of a session.

A thread is a chain of calls in which each continues the one before it. The first continuation of a call stays in its thread, every
other one starts a new thread. Each recorded call is in exactly one thread, so each sampled token is trained once; what a thread
shares with another one is part of its prompts. The thread of the last answer is the main one; it gets the reward.
"""

from collections.abc import Mapping
from typing import Any

from ludic.types import AgentStep, ConfigError, EnvironmentStep, Info, Rollout, StopReason, new_id
from ludic.types.rollout import THREAD
from ludic_serve.gateway.forest import Forest, Node
from ludic_serve.gateway.session import Session


def session_rollouts(
    session: Session,
    *,
    reward: float | Mapping[str, float] | None = 0.0,
    call_rewards: Mapping[str, float] | None = None,
    meta: Mapping[str, Any] | None = None,
    env_info: Info | None = None,
    stop: StopReason = StopReason.TERMINATED,
) -> list[Rollout]:
    """One rollout per thread of each trained policy, the main thread of a policy before its others.

    `reward` is a number or named components; None is for a session that has not ended, whose rollouts have no end either.
    `call_rewards` maps ids of replies to numbers; those of superseded and undelivered calls have no effect. Empty if no call was
    answered.
    """
    components = {"reward": float(reward)} if isinstance(reward, (int, float)) else dict(reward or {})
    has_ended = reward is not None
    by_node = _rewards_by_node(session, call_rewards or {})
    facts = {
        **(meta or {}),
        "session": session.id,
        "episode_truncated": stop.is_truncation,
        "truncation_reason": stop.value if stop.is_truncation else None,
    }
    rollouts = []
    for number, (name, policy) in enumerate(session.policies.items()):
        own = {**facts, "model": policy.model}
        if number:  # another player: its rollouts are compared with each other
            own["agent_id"] = f"{facts.get('agent_id', 'agent')}:{name}"
        threads = _threads(session.forests[name]) if policy.is_trained else []
        made = [Rollout(id=new_id(), meta=dict(own), stop=stop if has_ended else None) for _ in threads]
        step_ids: dict[Node, str] = {}
        for rollout, thread in zip(made, threads, strict=True):
            _write_calls(rollout, thread, by_node, step_ids)
        for index, (rollout, thread) in enumerate(zip(made, threads, strict=True)):
            rollout.meta[THREAD] = index
            if index == 0:
                if has_ended:
                    _write_reward(rollout, components, env_info or {}, stop)
                rollout.meta["gateway"] = dict(session.counts)
            else:
                parent = thread[0].parent
                rollout.meta |= {
                    "delegate": THREAD,
                    "parent_step_id": None if parent is None else step_ids.get(parent),
                }
        rollouts += made
    return rollouts


def _threads(forest: Forest) -> list[list[Node]]:
    """Every recorded call once; the main thread first, the others in the order of their first calls."""
    threads = []
    starts = [node for node in forest.roots if node.is_recorded]
    while starts:
        thread = [starts.pop()]
        while children := [node for node in thread[-1].children if node.is_recorded]:
            thread.append(children[0])
            starts += children[1:]
        threads.append(thread)
    threads.sort(key=lambda thread: thread[0].number)
    if threads:
        main = max(threads, key=lambda thread: thread[-1].ended_ns)
        threads.remove(main)
        threads.insert(0, main)
    return threads


def _rewards_by_node(session: Session, rewards: Mapping[str, float]) -> dict[Node, float]:
    found: dict[Node, float] = {}
    for call_id, value in rewards.items():
        node = session.find(call_id)
        if node is None:
            known = [f"chatcmpl-{node.token}" for node in session.nodes if node.is_recorded]
            shown = ", ".join(known[:3]) or "none"
            raise ConfigError(
                f"A reward is given for the call {call_id!r:.80}, which is not one of this session's ({shown}"
                f"{', …' if len(known) > 3 else ''}). Use the id of a reply, or of one of its tool calls."
            )
        name = next(name for name, forest in session.forests.items() if forest.find(node.token) is node)
        if not session.policies[name].is_trained:
            raise ConfigError(f"A reward is given for the call {call_id!r:.80} of {name!r:.80}, which is not trained.")
        found[node] = found.get(node, 0.0) + float(value)
    return found


def _write_calls(
    rollout: Rollout, thread: list[Node], rewards: Mapping[Node, float], step_ids: dict[Node, str]
) -> None:
    for number, node in enumerate(thread):
        reply, trace = node.reply, node.trace
        assert reply is not None and trace is not None, "a recorded call was answered"
        info: Info = {"call": node.kind, **node.info}
        if trace.finish_reason is not None:
            info["finish_reason"] = trace.finish_reason
        if node.is_rerendered:
            info["new_segment"] = True
        step = AgentStep(
            index=len(rollout.steps),
            prompt_messages=node.prompt_messages,
            action=node.text,
            trace=trace,
            action_target="env" if node is thread[-1] else "internal",
            info=info,
            id=f"{rollout.id}.{len(rollout.steps)}",
            ts_ns=node.ended_ns,
            turn_id=f"{rollout.id}/{number + 1}",
            tool_calls=node.message.get("tool_calls"),
        )
        rollout.steps.append(step)
        step_ids[node] = step.id
        if node in rewards:
            rollout.steps.append(_env_step(rollout, step, {"call": rewards[node]}))


def _write_reward(rollout: Rollout, components: Mapping[str, float], info: Info, stop: StopReason) -> None:
    """The transition that ends the episode, in the turn of the last call."""
    last = rollout.agent_steps[-1]
    step = _env_step(rollout, last, components)
    step.info = {**info, "finish_reason": last.info.get("finish_reason")}
    step.terminated, step.truncated = not stop.is_truncation, stop.is_truncation
    if step.truncated:
        step.info["truncation_reason"] = stop.value
    rollout.steps.append(step)


def _env_step(rollout: Rollout, call: AgentStep, components: Mapping[str, float]) -> EnvironmentStep:
    return EnvironmentStep(
        index=len(rollout.steps),
        prev_obs=None,
        action=call.action,
        parsed_action=call.action,
        next_obs=None,
        source_agent_step_id=call.id,
        agent_step_ids=[call.id],
        reward=sum(components.values()),
        trace=call.trace,
        reward_components=dict(components),
        id=f"{rollout.id}.{len(rollout.steps)}",
        ts_ns=call.ts_ns,
        turn_id=call.turn_id,
        parent_id=call.id,
    )
