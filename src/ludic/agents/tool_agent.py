"""`ToolAgent`: an agent whose model may call tools before it answers.

Two scopes: the agent runs `tools` (calculator, interpreter); the protocol runs `external_tools` (delegation, sub-agents). The
agent also runs the tools that an env offers for one episode (a search over its documents). Every model call is a separate step.
Tool errors are reported to the model and do not end the episode.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from ludic.agents.base_agent import Agent, AgentActResult, AgentActStep, ModelCall
from ludic.inference.templates.chat import READABLE_CALLS, ToolParseResult, require_text_calls, shows_tools
from ludic.parsers import ParseResult
from ludic.tools import Tool, ToolResult, as_tool
from ludic.types import ActionTarget, ConfigError, InferenceSpec, Info, Observation, OutOfRoom, ToolCall, derive_seed
from ludic.util.files import parse_json

ToolScope: TypeAlias = Literal["internal", "external"]
ToolLike: TypeAlias = Tool | Callable[..., Any]


class ToolAgent(Agent):
    """Calls tools in a loop until the model writes an action."""

    name = "tool_agent"

    def __init__(
        self,
        *,
        tools: Sequence[ToolLike] | None = None,
        external_tools: Sequence[ToolLike] | None = None,
        tools_in_prompt: bool = True,
        max_model_calls: int = 16,
        tool_parse_error_penalty: float = -1.0,
        tool_parse_error_feedback: str = (
            "The tool call could not be read. Write it exactly as described, with valid JSON, and close it."
        ),
        **agent_kwargs: Any,
    ) -> None:
        super().__init__(**agent_kwargs)
        self._own = [as_tool(tool) for tool in tools or ()]
        self._tools_in_prompt = tools_in_prompt
        self._external: dict[str, Tool] = _by_name(map(as_tool, external_tools or ()))
        self._num_external = len(external_tools or ())
        self._set_tools(())
        if max_model_calls < 1:
            raise ConfigError(f"max_model_calls={max_model_calls}; a turn needs at least one model call.")
        self.max_model_calls = max_model_calls
        self.tool_parse_error_penalty = tool_parse_error_penalty
        self.tool_parse_error_feedback = tool_parse_error_feedback
        self._num_tool_calls = 0
        self._calls_this_turn = 0
        """Counted over the whole turn, also across calls of external tools."""

    def take_tools(self, tools: Sequence[Callable[..., Any]]) -> None:
        if tools or self._of_episode:
            self._set_tools(tools)

    def _set_tools(self, of_episode: Sequence[Callable[..., Any]]) -> None:
        """Use the agent's own tools and those of an episode."""
        internal = [*self._own, *map(as_tool, of_episode)]
        self._of_episode = of_episode
        self.tool_map = _by_name(internal)
        self.tool_schemas = [tool.schema for tool in (*self.tool_map.values(), *self._external.values())]
        self._check_tools(len(internal) + self._num_external)
        listed = self.tool_schemas if self._tools_in_prompt else []
        self._as_text = listed if listed and not shows_tools(self.chat_template, listed) else []
        if self._as_text:
            require_text_calls(self.chat_template)
        self._advertised = listed if listed and not self._as_text else None

    def _check_tools(self, num_given: int) -> None:
        if len({*self.tool_map, *self._external}) != num_given:
            raise ConfigError(
                f"Two tools share a name: internal {sorted(self.tool_map)}, external {sorted(self._external)}. "
                "Names must be unique over both scopes and the env's tools."
            )
        if not num_given:
            return
        if not self.ctx.supports_tools:
            raise TypeError(f"{type(self.ctx).__name__} does not support tools (supports_tools is False).")
        if not self.chat_template.supports_tools():
            raise ConfigError(
                f"This agent has tools, but tool calls of its model cannot be read. {READABLE_CALLS}: use such a model (--model), "
                "or in Python give the template a parser, for example HFChatTemplate(tokenizer, tool_parser=HermesToolParser())."
            )

    def reset(self, system_prompt: str | None = None) -> None:
        super().reset(system_prompt)
        self._num_tool_calls = self._calls_this_turn = 0

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        super().on_env_reset(obs, info)
        self._calls_this_turn = 0

    def on_after_step(self, obs: Observation, info: Info) -> None:
        super().on_after_step(obs, info)
        self._calls_this_turn = 0

    # --- scopes ---

    def get_tool_scope(self, name: str) -> ToolScope | None:
        if name in self.tool_map:
            return "internal"
        return "external" if name in self._external else None

    def is_external_tool(self, name: str) -> bool:
        return name in self._external

    def has_external_tool_call(self, calls: Sequence[ToolCall]) -> bool:
        return any(self.is_external_tool(call["function"]["name"]) for call in calls)

    # --- the loop ---

    async def act(
        self,
        inference: InferenceSpec | None = None,
        sampling_seed: int | None = None,
        timeout_s: float | None = None,
    ) -> AgentActResult:
        steps: list[AgentActStep] = []
        while True:
            loop_index = self._calls_this_turn
            self._calls_this_turn += 1
            is_last = self._calls_this_turn == self.max_model_calls
            seed = None if sampling_seed is None else derive_seed(sampling_seed, loop_index)
            # The last call keeps the tool schemas too: without them the tokens already sent would change.
            try:
                steps += await self._make_room(inference, seed, timeout_s)
                if is_last:
                    self._before_last_call()
                call = await self._call_model(inference, seed, timeout_s, tools=self._advertised)
            except OutOfRoom:
                if not steps:
                    raise
                break  # keep the sampled steps; the protocol sees a turn that ends on a tool call
            steps.append(await self._step_of(call, loop_index, is_last))
            if steps[-1].action_target != "internal":
                break
        return AgentActResult(steps)

    def _before_last_call(self) -> None:
        """Hook to tell the model that it must answer now."""

    async def _step_of(self, call: ModelCall, loop_index: int, is_last: bool) -> AgentActStep:
        """Decide whether the reply is an action or tool calls, and run the internal ones."""
        if is_last or not self.tool_schemas or self._is_cut_off(call):
            parsed = ToolParseResult(content=call.text)
        else:
            parsed = self.chat_template.parse_tool_calls(call.text)
        if parsed.parse_error or not parsed.tool_calls:
            self._remember(call)
            if not parsed.parse_error:
                return self._action_step(call, loop_index)
            failure = ParseResult(None, self.tool_parse_error_penalty, self.tool_parse_error_feedback)
            info = {**call.info, "tool_parse_error": True}
            return self._step(call, loop_index=loop_index, parse_result=failure, info=info)
        calls = self._remember_calls(call, parsed)
        results = [await self._run_tool(c) for c in calls if not self.is_external_tool(c["function"]["name"])]
        target: ActionTarget = "external" if self.has_external_tool_call(calls) else "internal"
        if target == "internal":
            # With external calls the protocol adds all results, so that they are in the order of the calls.
            for result in results:
                self.add_tool_result(result["tool_call_id"], result["tool_name"], result["content"])
        return self._step(
            call,
            loop_index=loop_index,
            parse_result=None,
            action_target=target,
            tool_calls=calls,
            tool_results=results or None,
        )

    def _remember_calls(self, call: ModelCall, parsed: ToolParseResult) -> list[ToolCall]:
        """Store the reply with structured calls, numbered over the whole episode. The content leaves out the raw text of the
        calls, because a template would write them a second time."""
        calls: list[ToolCall] = []
        for found in parsed.tool_calls or ():
            calls.append({**found, "id": f"call{self._num_tool_calls:05d}"})
            self._num_tool_calls += 1
        self.ctx.add_assistant_step(parsed.content, calls)
        self._conversation.record(call.trace.completion_token_ids, parsed.content)
        return calls

    async def _run_tool(self, call: ToolCall) -> dict[str, Any]:
        """Run one call. The calls of one message run in order, because one may depend on another."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        tool = self.tool_map.get(name)
        if tool is None:
            known = ", ".join(sorted({*self.tool_map, *self._external})) or "none"
            answer = ToolResult(f"Error: there is no tool named {name!r}. Available tools: {known}.", is_error=True)
        else:
            answer = await tool.call(arguments)
        return {
            "tool_call_id": call["id"],
            "tool_name": name,
            "arguments_json": arguments,
            "content": answer.content,
            "is_error": answer.is_error,
        }


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


class CallAgent(ToolAgent):
    """One model call per turn. The action is a JSON list of the calls, `[{"name": …, "arguments": {…}}, …]`; the text of a
    reply without a call is read by the parser, as that of any agent."""

    name = "call_agent"

    def __init__(self, *, tool_parse_error_penalty: float = 0.0, **agent_kwargs: Any) -> None:
        super().__init__(tool_parse_error_penalty=tool_parse_error_penalty, max_model_calls=1, **agent_kwargs)

    async def _step_of(self, call: ModelCall, loop_index: int, is_last: bool) -> AgentActStep:
        parsed = self.chat_template.parse_tool_calls(call.text)
        if self._is_cut_off(call) or not (parsed.parse_error or parsed.tool_calls):
            self._remember(call)
            return self._action_step(call, loop_index)
        if parsed.parse_error:
            self._remember(call)
            failure = ParseResult(None, self.tool_parse_error_penalty, self.tool_parse_error_feedback)
            info = {**call.info, "tool_parse_error": True}
            return self._step(call, loop_index=loop_index, parse_result=failure, info=info)
        calls = self._remember_calls(call, parsed)
        functions = [each["function"] for each in calls]
        action = json.dumps(
            [{"name": each["name"], "arguments": parse_json(each["arguments"])} for each in functions],
            ensure_ascii=False,
        )
        return self._step(call, loop_index=loop_index, parse_result=ParseResult(action, 0.0, None), tool_calls=calls)
