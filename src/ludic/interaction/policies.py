"""The policies of a run by name, and agents for the roles of a request.

A policy is a name, a client that serves it, and optionally a trainer. Each request assigns policies to roles, so assignments can
change between episodes. Every rollout records its policy (its agent's `model`), by which it reaches the trainer
(`ludic.batch_gen.sources.shared`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from ludic.agents import Agent
from ludic.interaction.multi_agent import MultiAgentProtocol
from ludic.types import ChatClient, ConfigError, UnknownName

RoleAssignment: TypeAlias = Mapping[str, str]
"""Agent id → name of its policy."""
MakeAgent: TypeAlias = Callable[[ChatClient, str], Agent]
"""(client, the policy's name, which must be the agent's `model`) → a new agent."""


@runtime_checkable
class VersionedPolicies(Protocol):
    """Past versions of a policy as opponents, such as `ludic.inference.local.league.League`."""

    @property
    def versions(self) -> Sequence[int]: ...

    def client(self, version: int) -> ChatClient: ...


class Policies:
    """All policies that can be assigned to a role.

    A league has a name like any other policy; a request names one of its members, `name@version`.
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
            if not version.isdigit():
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
