"""The agents of the settings: `agent_factory` for those of ludic.agents, `outside_agent` for functions and commands."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ludic import plugins, registry
from ludic.agents import Agent
from ludic.inference import ChatTemplate
from ludic.interaction import InteractionProtocol
from ludic.parsers import Parser
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.given import Parts
from ludic.run.settings import require_kind
from ludic.types import ChatClient, ConfigError


class NamedAgent(Protocol):
    """An agent of another kind, as a run sees it."""

    name: str


A = TypeVar("A", bound=NamedAgent)


class AgentKind(ABC, Generic[A]):
    """A kind of agents: makes them, and protocols that play episodes with them."""

    @abstractmethod
    def make(self, settings: AgentSettings, function: Callable[..., Any] | None) -> A:
        """The agent of the settings: this function, or else the command that they name."""

    @abstractmethod
    def protocol(
        self,
        agent: A,
        settings: AgentSettings,
        parts: Parts,
        parser: Parser,
        template: ChatTemplate,
        model: str,
        closing: ExitStack,
    ) -> Callable[[ChatClient], InteractionProtocol]:
        """Makes a new protocol for each episode. What the episodes share ends with `closing`."""


def gateway_agents() -> AgentKind[Any]:
    """The kind that plays functions and commands; MissingPlugin if its plug-in is not installed."""
    point = plugins.find("agent_kinds", "gateway")
    if point is None:
        raise plugins.missing("ludic_serve", "An agent that is a function or a command")
    kind: AgentKind[Any] = point.load()
    return kind


def is_agent_function(found: Any) -> bool:
    """True if a part that was named as an agent is one that makes model calls over HTTP, and not a class or a function that makes
    Agents: those take a `client`."""
    if inspect.isclass(found) or not callable(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return False
    takes_parts = bool(parameters) and all(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return not takes_parts and all(parameter.name != "client" for parameter in parameters)


def uses_gateway(agent: AgentSettings, parts: Parts) -> bool:
    """True if the agent is a function or a command, which makes its model calls over HTTP."""
    if parts.protocol is not None:
        return False
    return agent.agent_command is not None or is_agent_function(named_agent(agent, parts))


def named_agent(agent: AgentSettings, parts: Parts) -> Any:
    """The class or function that the settings name, or that was given as an object; None where there is a command."""
    return parts.agent or (registry.agents.spec(agent.agent).load() if agent.agent is not None else None)


def outside_agent(agent: AgentSettings, parts: Parts) -> NamedAgent | None:
    """The agent that makes its model calls over HTTP; None if it is one of ludic.agents."""
    if not uses_gateway(agent, parts):
        return None
    own = "--tools are" if agent.tools or parts.tools else ""
    own = own if agent.protocol is None else f"protocol = {agent.protocol!r} is"
    if own:
        raise ConfigError(
            f"{own} for agents of ludic.agents; an agent that is a function or a command runs its own turns and tools. "
            "Leave one out."
        )
    return gateway_agents().make(agent, named_agent(agent, parts))


def agent_factory(
    agent: AgentSettings,
    template: ChatTemplate,
    model: str,
    parts: Parts | None = None,
    *,
    external_tools: Sequence[Any] = (),
) -> Callable[[ChatClient], Agent]:
    """Makes a new agent, with a new context, for each episode. `external_tools` are run by its protocol."""
    parts = parts or Parts()
    parser = parts.parser or registry.parsers.make(agent.parser or "raw", **agent.parser_set)
    arguments = dict(agent.agent_set) | ({"tools": agent.tools} if agent.tools else {})
    for scope in ("tools", "external_tools"):
        if scope in arguments:
            arguments[scope] = [registry.tools.make(name) for name in arguments[scope]]
    if parts.tools:
        arguments["tools"] = [*arguments.get("tools", ()), *parts.tools]
    if external_tools:
        arguments["external_tools"] = [*arguments.get("external_tools", ()), *external_tools]
    if agent.cut_off == "read":
        arguments["reject_incomplete_completions"] = False

    def make_agent(client: ChatClient) -> Agent:
        make_context = parts.context or partial(registry.contexts.make, agent.context)
        context = make_context(system_prompt=agent.system_prompt, **agent.context_set)
        agent_class = parts.agent or partial(registry.agents.make, agent.agent or "agent")
        made: Agent = agent_class(
            client=client, model=model, ctx=context, parser=parser, chat_template=template, **arguments
        )
        require_kind(made, Agent, f"agent = {agent.agent!r}", "be an Agent of ludic.agents")
        return made

    return make_agent
