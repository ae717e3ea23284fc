"""The protocol of the settings: the one that suits env and agent, or the one that `--protocol` names."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ludic import registry
from ludic.agents import Agent, CallAgent, ToolAgent
from ludic.inference import ChatTemplate
from ludic.interaction import (
    Delegate,
    DelegatingProtocol,
    InteractionProtocol,
    MultiAgentProtocol,
    SingleAgentProtocol,
    TaskEnv,
)
from ludic.run.config.entries import DelegateEntry
from ludic.run.config.env_and_agent import AgentSettings
from ludic.run.given import Parts
from ludic.run.protocols.agents import NamedAgent, agent_factory, gateway_agents, named_agent, outside_agent
from ludic.run.settings import converted, refuse, require_kind
from ludic.types import ChatClient, ConfigError, UnknownName


def protocol_factory(
    agent: AgentSettings,
    agent_ids: Sequence[str],
    template: ChatTemplate,
    model: str,
    parts: Parts,
    closing: ExitStack | None = None,
) -> Callable[[ChatClient], InteractionProtocol]:
    """Makes a new protocol, with new agents, for each episode of an env with these roles. What the episodes share ends with
    `closing`, or with their event loop."""
    make = parts.protocol
    if make is not None:
        return lambda client: make(client=client, model=model, chat_template=template)
    outside = outside_agent(agent, parts)
    refuse(_seat_problems(agent, agent_ids, parts, outside))
    if outside is not None:
        parser = parts.parser or registry.parsers.make(agent.parser or "raw", **agent.parser_set)
        kind, closing = gateway_agents(), closing or ExitStack()
        return kind.protocol(outside, agent, parts, parser, template, model, closing)
    if agent.protocol is not None:
        return _named_protocol(agent.protocol, agent, agent_ids, template, model, parts)
    make_agent = agent_factory(agent, template, model, parts)
    if len(agent_ids) == 1:
        return lambda client: SingleAgentProtocol(make_agent(client), stop_on_parse_error=agent.unreadable == "stop")
    return lambda client: MultiAgentProtocol({agent_id: make_agent(client) for agent_id in agent_ids})


def _seat_problems(
    agent: AgentSettings, roles: Sequence[str], parts: Parts, outside: NamedAgent | None
) -> Iterator[str]:
    """An agent, or objects for it, that do not suit the roles of the env."""
    several = ", ".join(roles) if len(roles) > 1 else ""
    if outside is not None and len(roles) != 1:
        yield f"The agent {outside.name} plays envs with one agent; this one has {several}. Take an agent of ludic.agents."
    if outside is None and (parts.reward is not None or parts.policies):
        yield "reward= and policies= are for an agent that is a function or a command (docs/gateway.md)."
    if outside is None and agent.protocol is None and several and agent.unreadable == "stop":
        yield f"unreadable=stop is for envs with one agent; this one has {several}."


_OFFERED = frozenset({"agent", "agents", "client", "model", "chat_template"})
"""Arguments of a named protocol that has such parameters."""


def _named_protocol(
    id: str, agent: AgentSettings, agent_ids: Sequence[str], template: ChatTemplate, model: str, parts: Parts
) -> Callable[[ChatClient], InteractionProtocol]:
    """Makes the protocol of the settings, with agents of the settings where it takes some."""
    factory, arguments = registry.protocols.spec(id).load(), dict(agent.protocol_set)
    takes = _parameters(factory)
    stops = agent.unreadable == "stop" and "client" not in takes
    refuse(_protocol_problems(id, takes, agent_ids, stops=stops))
    for name in arguments:
        if name not in takes - _OFFERED:
            raise UnknownName.among(f"argument of the protocol {id}", name, sorted(takes - _OFFERED))
    if stops:
        arguments.setdefault("stop_on_parse_error", True)
    entries = _delegates(id, agent, parts) if "delegates" in takes and delegates_tasks(factory) else {}
    sub_agents = {name: _sub_agent(entry, agent, entries, template, model, parts) for name, entry in entries.items()}
    tools = [DelegatingProtocol.tool(_as_delegates(entries))] if entries else []
    make_agent = agent_factory(agent, template, model, parts, external_tools=tools)

    def make(client: ChatClient) -> InteractionProtocol:
        given: dict[str, Any] = {"client": client, "model": model, "chat_template": template}
        if "agent" in takes:
            given["agent"] = make_agent(client)
        if "agents" in takes:
            given["agents"] = {agent_id: make_agent(client) for agent_id in agent_ids}
        if entries:
            given["delegates"] = _as_delegates(
                entries, {name: partial(one, client) for name, one in sub_agents.items()}
            )
        made = registry.protocols.make(id, **arguments | {name: given[name] for name in given if name in takes})
        require_kind(made, InteractionProtocol, f"protocol = {id!r}", "be an InteractionProtocol of ludic.interaction")
        return made

    return make


def _protocol_problems(id: str, takes: set[str], roles: Sequence[str], *, stops: bool) -> Iterator[str]:
    """A protocol that no model would play, or that does not suit the env or its settings."""
    if takes.isdisjoint({"agent", "agents", "client"}):
        yield f"protocol = {id!r} has none of the parameters agent, agents and client, so no model would play. Add one."
    if "agent" in takes and len(roles) != 1:
        yield f"protocol = {id!r} runs one agent, but the env has {', '.join(roles)}. Take multi_agent."
    if stops and "stop_on_parse_error" not in takes:
        yield f"unreadable=stop is for protocols that stop on it; {id} goes on. Give --unreadable go_on."


def _parameters(factory: Callable[..., Any]) -> set[str]:
    """Names of the parameters; of a class that passes unknown ones on, also those of its bases."""
    parameters = inspect.signature(factory).parameters
    passes_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    bases = factory.__mro__[1:-1] if passes_on and isinstance(factory, type) else ()
    own = {one.name for one in parameters.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return own | (_parameters(bases[0]) if bases else set())


# --- sub-agents ---


def delegates_tasks(factory: Callable[..., Any]) -> bool:
    """True if its episodes have rollouts of sub-agents."""
    return isinstance(factory, type) and issubclass(factory, DelegatingProtocol)


def _delegates(id: str, agent: AgentSettings, parts: Parts) -> dict[str, DelegateEntry]:
    """The sub-agents of the settings; ConfigError unless there are some and the agent can call them."""
    given = agent.protocol_set.get("delegates")
    if not given or not isinstance(given, Mapping):
        raise ConfigError(
            f'protocol = {id!r} needs sub-agents: --protocol-set \'delegates={{"solver": "solves one sub-task"}}\', or a table '
            "for each in a file (docs/algorithms/fold_grpo.md)."
        )
    if not _hands_calls_on(named_agent(agent, parts)):
        raise ConfigError(
            f"protocol = {id!r} is called as a tool, and agent = {agent.agent!r} calls none that a protocol runs. Take react."
        )
    tables = {name: {"description": one} if isinstance(one, str) else one for name, one in given.items()}
    found: dict[str, DelegateEntry] = converted(tables, dict[str, DelegateEntry], "protocol_set.delegates")
    return found


def _hands_calls_on(agent: Any) -> bool:
    """True if the agent leaves calls of external tools to its protocol."""
    return isinstance(agent, type) and issubclass(agent, ToolAgent) and not issubclass(agent, CallAgent)


def _as_delegates(
    entries: Mapping[str, DelegateEntry], make_agents: Mapping[str, Callable[[], Agent]] | None = None
) -> dict[str, Delegate]:
    def uncalled() -> Agent:
        raise AssertionError("these describe the tool; they start no episode")

    return {
        name: Delegate(
            make_agent=uncalled if make_agents is None else make_agents[name],
            make_env=TaskEnv if entry.env is None else registry.envs.spec(entry.env).load(),
            max_steps=entry.max_steps,
            description=entry.description,
        )
        for name, entry in entries.items()
    }


def _sub_agent(
    entry: DelegateEntry,
    agent: AgentSettings,
    entries: Mapping[str, DelegateEntry],
    template: ChatTemplate,
    model: str,
    parts: Parts,
) -> Callable[[ChatClient], Agent]:
    """Makes agents of one kind of sub-agent."""
    delegates_too = agent.protocol_set.get("max_depth", 1) > 1
    own = replace(
        agent,
        agent=entry.agent or ("react" if entry.tools or delegates_too else "agent"),
        agent_set=entry.agent_set,
        tools=entry.tools,
        parser=entry.parser,
        parser_set=entry.parser_set,
        system_prompt=entry.system_prompt,
        protocol=None,
        protocol_set={},
    )
    may_call = delegates_too and _hands_calls_on(named_agent(own, Parts()))
    tools = [DelegatingProtocol.tool(_as_delegates(entries))] if may_call else []
    return agent_factory(own, template, model, Parts(context=parts.context), external_tools=tools)
