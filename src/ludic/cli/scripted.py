"""Agents without a model for the command line: they play an env's reference solution, or any legal move."""

import random
from collections.abc import Callable

from ludic.agents import Agent, ToolAgent
from ludic.context import FullDialog
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient
from ludic.interaction import InteractionProtocol, MultiAgentProtocol, SingleAgentProtocol
from ludic.interaction.base import AnyEnv
from ludic.parsers import raw_parser
from ludic.types import ConfigError, TokenCompletionRequest

Chooser = Callable[[AnyEnv, str], str]


def reference_or_random(rng: random.Random) -> Chooser:
    """The reference solution if there is one, else a random legal action."""

    def choose(env: AnyEnv, agent_id: str) -> str:
        action: str | None = env.reference_action(agent_id)
        return random_legal(rng)(env, agent_id) if action is None else action

    return choose


def random_legal(rng: random.Random) -> Chooser:
    def choose(env: AnyEnv, agent_id: str) -> str:
        legal = env.legal_actions(agent_id)
        if not legal:
            raise ConfigError(
                f"{type(env).__name__} names neither legal actions nor a reference solution, so a scripted agent "
                "does not know what to play."
            )
        return rng.choice(legal)

    return choose


def scripted_protocol(env: AnyEnv, choose: Chooser) -> InteractionProtocol:
    """A protocol with real agents and templates on a client that replies with `choose`."""

    def agent_for(agent_id: str) -> Agent:
        def reply(request: TokenCompletionRequest) -> str:
            return choose(env, agent_id)

        # An env with tools needs an agent that can call them.
        return ToolAgent(
            client=ScriptedClient(reply),
            model="scripted",
            ctx=FullDialog(),
            parser=raw_parser,
            chat_template=ByteTemplate(tool_parser=HermesToolParser()),
            # A client without a model is not short of tokens.
            reject_incomplete_completions=False,
        )

    agents = {agent_id: agent_for(agent_id) for agent_id in env.agent_ids}
    if len(agents) == 1:
        return SingleAgentProtocol(*agents.values())
    return MultiAgentProtocol(agents)
