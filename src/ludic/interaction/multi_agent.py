"""`MultiAgentProtocol`: any number of agents in one environment, taking turns or moving at once."""

from collections.abc import Mapping, Sequence

from ludic.agents import Agent
from ludic.interaction.base import (
    AnyEnv,
    ExternalToolHandler,
    InteractionProtocol,
    ToolAnswers,
    check_outcomes,
    check_run,
    opening_for,
    outcome_for,
)
from ludic.interaction.collector import TraceCollector
from ludic.interaction.failures import all_or_none
from ludic.interaction.session import AgentSession, TurnResult, call_handler
from ludic.types import AgentStep, ConfigError, InferenceSpec, Rollout, StopReason, ToolCall, derive_seed


class MultiAgentProtocol(InteractionProtocol):
    """In each step all managed agents whose turn it is act concurrently; then the env steps.

    Agents of the env that are not in `agents` are left to the env. Every managed agent observes each outcome addressed to it, also
    if it did not act, and finishes independently.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent],
        *,
        external_tool_handler: ExternalToolHandler | None = None,
        external_tool_timeout_s: float | None = 300.0,
        max_external_rounds: int = 8,
    ) -> None:
        if not agents:
            raise ConfigError("MultiAgentProtocol needs at least one agent: agents={id: agent, …}.")
        if len({id(agent) for agent in agents.values()}) != len(agents):
            raise ConfigError("Two roles share one Agent object; each needs its own, since an agent has a memory.")
        self.agents = dict(agents)
        self.external_tool_handler = external_tool_handler
        self.external_tool_timeout_s = external_tool_timeout_s
        self.max_external_rounds = max_external_rounds

    async def run(
        self,
        *,
        env: AnyEnv,
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        check_run(env, max_steps)
        self._check_roles(env)
        for agent in self.agents.values():
            agent.require_free()  # before touching the state of a running episode
        collector = TraceCollector.for_episode(env, env_seed=env_seed, sampling_seed=sampling_seed)
        self._collector = collector
        handler = self._external_tools if self.external_tool_handler is not None else None
        sessions = [
            AgentSession(
                agent_id=agent_id,
                agent=agent,
                collector=collector,
                sampling_seed=self._seed_of(env, agent_id, sampling_seed),
                inference=inference,
                timeout_s=timeout_s,
                external_tools=handler,
                max_external_rounds=self.max_external_rounds,
            )
            for agent_id, agent in self.agents.items()
        ]
        opening = await self._call_env(env, "reset", env.async_reset(seed=env_seed))
        openings = [opening_for(env, session.agent_id, opening) for session in sessions]
        started: list[AgentSession] = []
        try:
            for session, first in zip(sessions, openings, strict=True):
                session.start(first, env)
                started.append(session)
            stop = await self._run_turns(env, sessions, max_steps)
            for session in sessions:
                session.finish(stop)
        finally:
            for session in started:
                session.close()
        return collector.extract_rollouts_with_per_agent_status()

    async def _run_turns(self, env: AnyEnv, sessions: Sequence[AgentSession], max_steps: int) -> StopReason:
        """Step until no agent is left; returns the stop reason of the agents that have not finished."""
        for _ in range(max_steps):
            active = env.active_agents
            if not active or all(session.finished or session.retired for session in sessions):
                return StopReason.NOBODY_ACTIVE
            acting = [s for s in sessions if s.agent_id in active and not s.finished and s.retired is None]
            turns = dict(
                zip(
                    (session.agent_id for session in acting),
                    await all_or_none(session.take_turn() for session in acting),
                    strict=True,
                )
            )
            self._settle(acting, turns)
            actions = {agent_id: turn.action for agent_id, turn in turns.items() if turn.action is not None}
            if turns and not actions and not any(session.retired for session in acting):
                continue  # no reply could be parsed, so the env does not step
            outcomes = check_outcomes(env, await self._call_env(env, "step", env.async_step(actions)), actions)
            for session in sessions:
                if not session.finished and session.agent_id in outcomes:
                    turn = turns.get(session.agent_id) if session.retired is None else None
                    session.observe(outcome_for(env, session.agent_id, outcomes), turn)
        return StopReason.MAX_STEPS if env.active_agents else StopReason.NOBODY_ACTIVE

    @staticmethod
    def _settle(acting: Sequence[AgentSession], turns: Mapping[str, TurnResult]) -> None:
        """Give feedback for replies without an action; stop agents without room for another prompt."""
        for session in acting:
            turn = turns[session.agent_id]
            if turn.out_of_room is not None:
                session.stop_acting(turn.out_of_room)
            elif turn.action is None:
                session.reject(turn)

    def _check_roles(self, env: AnyEnv) -> None:
        unknown = sorted(set(self.agents) - set(env.agent_ids))
        if unknown:
            raise ConfigError(
                f"MultiAgentProtocol manages {unknown}, but {type(env).__name__} has the roles {list(env.agent_ids)}."
            )

    @staticmethod
    def _seed_of(env: AnyEnv, agent_id: str, sampling_seed: int | None) -> int | None:
        """A seed per role, independent of which other roles are managed."""
        return None if sampling_seed is None else derive_seed(sampling_seed, list(env.agent_ids).index(agent_id))

    async def _external_tools(self, calls: list[ToolCall], step: AgentStep) -> ToolAnswers:
        assert self.external_tool_handler is not None, "run passes this method only if there is a handler"
        return await call_handler(self.external_tool_handler, calls, self.external_tool_timeout_s)
