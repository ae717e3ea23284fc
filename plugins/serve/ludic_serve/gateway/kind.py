"""How a run plays agents that are functions or commands: the entry `gateway` of the group `ludic.agent_kinds`."""

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ludic.inference import ChatTemplate
from ludic.interaction import InteractionProtocol
from ludic.parsers import Parser
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.given import Parts
from ludic.run.protocols.agents import AgentKind
from ludic.types import ChatClient, MissingExtra
from ludic_serve.gateway.agents import AgentCommand, AgentFunction, OutsideAgent
from ludic_serve.gateway.protocol import GatewayProtocol
from ludic_serve.gateway.session import SessionLimits


class GatewayAgents(AgentKind[OutsideAgent]):
    """Agents that make their model calls over HTTP, at a gateway in this process."""

    def make(self, settings: AgentSettings, function: Callable[..., Any] | None) -> OutsideAgent:
        if importlib.util.find_spec("aiohttp") is None:
            raise MissingExtra("serve", "An agent that is a function or a command")
        if settings.agent_command is None:
            assert function is not None, "the settings name a function or a command"
            return AgentFunction(function, settings.agent_set)
        return AgentCommand(
            settings.agent_command,
            sandbox=settings.agent_sandbox,
            binds=settings.agent_bind,
            memory_mb=settings.agent_memory,
        )

    def protocol(
        self,
        agent: OutsideAgent,
        settings: AgentSettings,
        parts: Parts,
        parser: Parser,
        template: ChatTemplate,
        model: str,
        closing: ExitStack,
    ) -> Callable[[ChatClient], InteractionProtocol]:
        closing.callback(agent.gateways.close)
        return lambda client: GatewayProtocol(
            agent,
            client=client,
            model=model,
            chat_template=template,
            reward=parts.reward,
            policies=parts.policies,
            limits=SessionLimits(max_calls=settings.agent_max_calls, max_tokens=settings.agent_max_tokens),
            failed_reward=settings.failed_reward,
            system_prompt=settings.system_prompt,
            parser=parser,
            lenient=settings.lenient,
        )


GATEWAY = GatewayAgents()
