"""`MultiAgentProtocol`: any number of agents in one environment, taking turns or moving at once; `Policies`: which policy acts
in which role.

A role is an agent id of the env, such as a player of a game (not a role of a pipeline's process).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from ludic.agents import Agent
from ludic.interaction.base import AnyEnv, ExternalToolHandler, InteractionProtocol, TraceCollector
from ludic.interaction.env_outputs import check_outcomes, check_run, opening_for, outcome_for
from ludic.interaction.session import AgentSession, TurnResult, external_tools
from ludic.tasks import all_or_none
from ludic.types import ChatClient, ConfigError, InferenceSpec, Rollout, StopReason, UnknownName, derive_seed

RoleAssignment: TypeAlias = Mapping[str, str]
"""Role in the env (an agent id) → name of the policy that acts in it."""
MakeAgent: TypeAlias = Callable[[ChatClient, str], Agent]
"""(client, the policy's name, which must be the agent's `model`) → a new agent."""


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
            raise ConfigError("Two agent ids share one Agent object; each needs its own, since an agent has a memory.")
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
        ids = list(env.agent_ids)
        tools = external_tools(self.external_tool_handler, self.external_tool_timeout_s)
        sessions = [
            AgentSession(
                agent_id=agent_id,
                agent=agent,
                collector=collector,
                # A seed per agent id of the env, independent of which others are managed.
                sampling_seed=None if sampling_seed is None else derive_seed(sampling_seed, ids.index(agent_id)),
                inference=inference,
                timeout_s=timeout_s,
                external_tools=tools,
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
            taken = await all_or_none(session.take_turn() for session in acting)
            turns = {session.agent_id: turn for session, turn in zip(acting, taken, strict=True)}
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
                f"MultiAgentProtocol manages {unknown}, but {type(env).__name__} has the agents {list(env.agent_ids)}."
            )


@runtime_checkable
class VersionedPolicies(Protocol):
    """Past versions of a policy as opponents, such as `ludic.inference.local.snapshot.League`."""

    @property
    def versions(self) -> Sequence[int]: ...

    def client(self, version: int) -> ChatClient: ...


class Policies:
    """The policies of a run by name: each a client that serves it, and optionally a trainer.

    Each request assigns policies to roles, so assignments can change between episodes. Every rollout records its policy (its
    agent's `model`), by which it reaches the trainer (`ludic.batch_gen.sources.shared`). A league has a name like any other
    policy; a request names one of its members, `name@version`.
    """

    def __init__(self, players: Mapping[str, ChatClient | VersionedPolicies], make_agent: MakeAgent) -> None:
        wrong = sorted(name for name in players if "@" in name)
        if wrong:
            raise ConfigError(f"The policies {wrong} have an @ in their names, which stands before a league's version.")
        self._players = dict(players)
        self._make_agent = make_agent

    def protocol(self, policies: RoleAssignment) -> MultiAgentProtocol:
        """The factory of a protocol: RolloutEngine(protocol_registry={"duel": policies.protocol})."""
        return MultiAgentProtocol({agent_id: self._agent(name) for agent_id, name in policies.items()})

    def draw(self, name: str, seed: int) -> str:
        """The name of the policy, or of the league member drawn by this seed."""
        player = self._player(name)
        if not isinstance(player, VersionedPolicies):
            return name
        if not player.versions:
            raise ConfigError(
                f"The league {name!r} has no members yet. Give it to the source of the policy that it follows "
                "(batches_for(…, followers=[league])) and make that trainer before the first episode, or call league.add(0)."
            )
        return f"{name}@{player.versions[seed % len(player.versions)]}"

    def client(self, name: str) -> ChatClient:
        """The client of this policy."""
        league, is_member, version = name.partition("@")
        player = self._player(league)
        if isinstance(player, VersionedPolicies):
            if not version.isdecimal():
                raise ConfigError(f"{name!r} is a league; assign one of its members, such as {league}@0.")
            return player.client(int(version))
        if is_member:
            raise ConfigError(
                f"{name!r} names a version, but {league!r} is not a league and has only its current version."
            )
        return player

    def _agent(self, name: str) -> Agent:
        agent = self._make_agent(self.client(name), name)
        if agent.model != name:
            raise ConfigError(
                f"make_agent was asked for an agent of the policy {name!r} and gave it model={agent.model!r}. A rollout is "
                "filed under its agent's model: pass the name on, Agent(model=name, …)."
            )
        return agent

    def _player(self, name: str) -> ChatClient | VersionedPolicies:
        if name not in self._players:
            raise UnknownName.among("policy", name, self._players, "Add it to Policies.")
        return self._players[name]
