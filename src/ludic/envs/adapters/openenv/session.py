"""One session of a server: an env, its running episode, and the replies to a client's messages."""

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.envs.check import Env
from ludic.tools import Tool, as_tool
from ludic.types import Info, Observation

_TEXT = {"type": "string"}
_METADATA = {"type": "object", "additionalProperties": True, "default": {}}
SCHEMAS: Mapping[str, Any] = {
    "action": {
        "title": "LudicAction",
        "type": "object",
        "additionalProperties": False,
        "properties": {"text": {**_TEXT, "description": "the reply, as a model writes it"}, "metadata": _METADATA},
        "required": ["text"],
    },
    "observation": {
        "title": "LudicObservation",
        "type": "object",
        "properties": {
            "text": _TEXT,
            "legal_actions": {"anyOf": [{"type": "array", "items": _TEXT}, {"type": "null"}]},
            "metadata": _METADATA,
        },
        "required": ["text"],
    },
    "state": {
        "title": "LudicState",
        "type": "object",
        "properties": {"episode_id": {"anyOf": [_TEXT, {"type": "null"}]}, "step_count": {"type": "integer"}},
    },
}


class Refused(Exception):
    """An error reply; `code` is one of OpenEnv's."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **details}


class RpcError(Exception):
    """An error reply to a JSON-RPC call."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Session:
    """One env and its running episode."""

    make: Callable[..., Env]
    samples: Sequence[Mapping[str, Any]]
    """Of a dataset env: each episode plays the one that its seed picks."""
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    episode_id: str | None = None
    num_steps: int = 0
    is_attached: bool = False
    """A WebSocket uses it."""
    used_at: float = field(default_factory=time.monotonic)
    tools: dict[str, Tool] = field(default_factory=dict)
    env: Env = field(init=False)

    def __post_init__(self) -> None:
        self.env = self.make(sample=self.samples[0]) if self.samples else self.make()

    @property
    def agent(self) -> str:
        return str(self.env.agent_ids[0])

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        seed, episode_id = data.get("seed"), data.get("episode_id")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise Refused("VALIDATION_ERROR", f"seed={seed!r} is no whole number from 0.", errors=["seed"])
        if episode_id is not None and not isinstance(episode_id, str):
            raise Refused("VALIDATION_ERROR", "episode_id must be text.", errors=["episode_id"])
        if self.samples:
            await self.env.async_close()
            index = random.randrange(len(self.samples)) if seed is None else seed % len(self.samples)
            self.env = self.make(sample=self.samples[index])
        opening = await self.env.async_reset(seed=seed)
        self.episode_id, self.num_steps = episode_id or str(uuid.uuid4()), 0
        self.tools = {tool.name: tool for tool in map(as_tool, self.env.episode_tools(self.agent))}
        obs, info = opening[self.agent]
        prompt = self.env.suggested_sysprompt
        return self._observation(obs, info, None, {} if prompt is None else {"system_prompt": prompt})

    async def step(self, action: Any) -> dict[str, Any]:
        if not isinstance(action, Mapping):
            raise Refused("VALIDATION_ERROR", "An action is a JSON object.", errors=["action"])
        if action.get("type") == "list_tools":
            return {
                "observation": {"tools": self.listed_tools("input_schema"), "metadata": {}},
                "reward": None,
                "done": False,
            }
        if action.get("type") == "call_tool":
            return await self._tool_step(action)
        unknown = sorted(set(action) - {"text", "metadata"})
        if unknown or not isinstance(action.get("text"), str):
            problem = f"it has the unknown fields {unknown}" if unknown else "text is missing or no string"
            raise Refused("VALIDATION_ERROR", f"An action is {{'text': …}}: {problem}.", errors=unknown or ["text"])
        outcomes = await self.env.async_step({self.agent: action["text"]})
        self.num_steps += 1
        outcome = outcomes[self.agent]
        ends = {"terminated": outcome.terminated, "truncated": outcome.truncated}
        is_done = outcome.terminated or outcome.truncated
        return self._observation(outcome.obs, outcome.info, outcome.reward, ends, is_done=is_done)

    def _observation(
        self, obs: Observation, info: Info, reward: float | None, facts: Mapping[str, Any], *, is_done: bool = False
    ) -> dict[str, Any]:
        legal = None if is_done else self.env.legal_actions(self.agent)
        metadata = {"info": info, **facts}
        seen = {"text": obs, "legal_actions": legal, "metadata": metadata}
        return {"observation": seen, "reward": reward, "done": is_done, "metadata": metadata}

    def state(self) -> dict[str, Any]:
        return {"episode_id": self.episode_id, "step_count": self.num_steps}

    # --- tools ---

    def listed_tools(self, schema_key: str) -> list[dict[str, Any]]:
        return [{"name": t.name, "description": t.description, schema_key: t.parameters} for t in self.tools.values()]

    async def _tool_step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        name = str(action.get("tool_name"))
        result, error = None, None
        if name in self.tools:
            result = (await self.tools[name].call(action.get("arguments") or {})).content
        else:
            error = {"error_type": "tool_not_found", "message": f"Tool not found: {name}"}
        seen = {"tool_name": name, "result": result, "error": error, "metadata": {}}
        return {"observation": seen, "reward": None, "done": False}

    async def mcp(self, method: str, params: Mapping[str, Any]) -> Any:
        if method == "tools/list":
            return {"tools": self.listed_tools("inputSchema")}
        if method != "tools/call":
            raise RpcError(-32601, f"Method not found: {method}")
        tool = self.tools.get(str(params.get("name")))
        if tool is None:
            raise RpcError(-32602, f"Tool not found: {params.get('name')}")
        said = await tool.call(params.get("arguments") or {})
        return {"content": [{"type": "text", "text": said.content}], "isError": said.is_error, "data": said.content}
