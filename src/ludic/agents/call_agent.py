"""`CallAgent`: an agent whose tool calls are its action.

`ToolAgent` runs calls and shows their results to the model; here nothing is run. The calls of a reply go to the env as one action,
which is how function calling is graded: by what is called, with which arguments.
"""

import json
from typing import Any

from ludic.agents.base_agent import AgentActStep, ModelCall
from ludic.agents.tool_agent import ToolAgent
from ludic.parsers import ParseResult
from ludic.util.files import parse_json


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
