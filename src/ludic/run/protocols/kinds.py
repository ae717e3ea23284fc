"""Agents that are no classes of `ludic.agents` but functions or commands, which make their model calls over HTTP.

The plug-in that plays them is found through the entry-point group `ludic.agent_kinds`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

from ludic import plugins
from ludic.inference import ChatTemplate
from ludic.interaction import InteractionProtocol
from ludic.parsers import Parser
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.given import Parts
from ludic.types import ChatClient


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
    """Whether a part that was named as an agent is one that makes model calls over HTTP, and not a class or a function that makes
    Agents: those take a `client`."""
    if inspect.isclass(found) or not callable(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return False
    takes_parts = bool(parameters) and all(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return not takes_parts and all(parameter.name != "client" for parameter in parameters)
