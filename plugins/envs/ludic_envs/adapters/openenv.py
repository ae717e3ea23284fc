"""OpenEnv servers as envs: a WebSocket session per episode, with typed actions as JSON and MCP tools.

An OpenEnv server publishes the JSON schema of its actions. Where an action has one plain field, the reply is its value; else the
reply is the action as a JSON object. With `tools=True` the server's MCP tools are the tools of the episode. The protocol is that
of the package `openenv` 0.10, which is not needed here.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.tools.tool import tool_from_schema
from ludic.types import ConfigError, Info, LudicError, MissingExtra, Observation, StepOutcome
from ludic.util.files import parse_json
from ludic_envs.adapters.base import as_json, as_text
from ludic_envs.adapters.openenv_actions import ActionFormat, UnreadableAction

_MAX_MESSAGE = 100 * 2**20


class OpenEnvError(LudicError, RuntimeError):
    """An OpenEnv server refused a message, or did not respond."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """OpenEnv's error code, such as CAPACITY_REACHED."""


class Connection:
    """A WebSocket to a server, which holds one env for it."""

    def __init__(self, server: str, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._numbers, self._turn = itertools.count(1), asyncio.Lock()
        self._is_behind = False
        """A reply was not waited for; the next one would be taken for it."""

    @classmethod
    async def open(
        cls, server: str, start: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float, wait_s: float
    ) -> tuple["Connection", dict[str, Any]]:
        """Connect and reset; returns the connection and the first observation.

        A server whose sessions are all in use says so in reply to the first message; then it is asked again for `wait_s` seconds.
        """
        waits, deadline = 0.05, asyncio.get_running_loop().time() + wait_s
        while True:
            connection = cls(server, timeout_s)
            try:
                await connection._connect(headers)
                return connection, await connection.ask("reset", start)
            except OpenEnvError as error:
                await connection.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if asyncio.get_running_loop().time() + waits > deadline:
                    raise OpenEnvError(
                        f"{error} It had no free session for {wait_s:g} s. Start it with more (max_concurrent_envs), play fewer "
                        "episodes at once (--concurrency), or raise wait_s.",
                        code=error.code,
                    ) from error
            except BaseException:
                await connection.close()
                raise
            await asyncio.sleep(waits)
            waits = min(2 * waits, 1.0)

    async def _connect(self, headers: Mapping[str, str]) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtra("openenv", "The env 'openenv'") from error
        self._http: aiohttp.ClientSession | None = None
        self._base = self._server.replace("ws://", "http://", 1).replace("wss://", "https://", 1)
        self._http = aiohttp.ClientSession(headers=dict(headers))
        try:
            wait = aiohttp.ClientWSTimeout(ws_close=5.0)
            self._socket = await asyncio.wait_for(
                self._http.ws_connect(f"{self._base}/ws", max_msg_size=_MAX_MESSAGE, timeout=wait), self._timeout_s
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise OpenEnvError(
                f"The OpenEnv server {self._server} cannot be reached ({type(error).__name__}: {error}). Start it, or check the "
                "address and its token (headers)."
            ) from error

    async def close(self) -> None:
        if getattr(self, "_http", None) is not None:
            assert self._http is not None, "just asked"
            await self._http.close()

    async def get(self, what: str) -> Any:
        """A document of the server, such as its schema."""
        import aiohttp

        assert self._http is not None, "connected"
        try:
            async with self._http.get(
                f"{self._base}/{what}", timeout=aiohttp.ClientTimeout(self._timeout_s)
            ) as response:
                response.raise_for_status()
                return parse_json(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise OpenEnvError(f"The OpenEnv server {self._server} gave no {what}: {error}") from error

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The data of the reply to one message; an agent may call several tools at once, which take turns here."""
        import aiohttp

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        async with self._turn:
            if self._is_behind:
                raise OpenEnvError(
                    f"An earlier message to the OpenEnv server {self._server} was cut off; reset the env."
                )
            self._is_behind = True
            try:
                await self._socket.send_json(message)
                got = await self._socket.receive(timeout=self._timeout_s)
            except (aiohttp.ClientError, OSError) as error:
                raise OpenEnvError(f"The connection to the OpenEnv server {self._server} broke: {error}") from error
            except TimeoutError as error:
                raise OpenEnvError(
                    f"The OpenEnv server {self._server} did not respond to {kind!r} within {self._timeout_s:g} s; raise timeout_s."
                ) from error
            self._is_behind = False
        if got.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvError(f"The OpenEnv server {self._server} closed the session at {kind!r}.")
        try:
            reply = parse_json(got.data)
            about: dict[str, Any] = reply.get("data") or {}
        except (ValueError, AttributeError) as error:
            raise OpenEnvError(
                f"The OpenEnv server {self._server} sent no JSON object at {kind!r}: {error}."
            ) from error
        if reply.get("type") == "error":
            details = f" {json.dumps(about['errors'])[:500]}" if about.get("errors") else ""
            raise OpenEnvError(
                f"The OpenEnv server says: {about.get('message')}{details}", code=str(about.get("code", ""))
            )
        return about

    async def rpc(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result of an MCP call (JSON-RPC) in this session."""
        call = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": dict(params)}
        reply = await self.ask("mcp", call)
        if reply.get("error"):
            raise OpenEnvError(
                f"The OpenEnv server {self._server} says to {method}: {reply['error'].get('message')}", code="MCP"
            )
        return reply.get("result")

    async def list_tools(self) -> list[dict[str, Any]]:
        """Name, description and parameters of the MCP tools; none if the server has none."""
        try:
            found = (await self.rpc("tools/list", {})).get("tools", [])
        except OpenEnvError as error:
            if error.code == "MCP":
                return []
            raise
        return [
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or {},
            }
            for tool in found
        ]


MAX_SEED = 2**31
"""Seeds are reduced below it: many servers hand them to numpy, which takes 32 bits."""
_NOT_SHOWN = {"metadata", "legal_actions"}
_OVER = "The episode is over."


class OpenEnvEnv(SingleAgentEnv):
    """An env behind an OpenEnv server."""

    def __init__(
        self,
        server: str,
        *,
        reset_args: Mapping[str, Any] | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        tools: bool = False,
        invalid_reward: float = 0.0,
        on_error: Literal["fail", "observe"] = "fail",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        wait_s: float = 60.0,
        system_prompt: str | None = None,
    ) -> None:
        """`server` is its URL (http://host:8000). `reset_args` go into every reset message with the seed. `action_field` names the
        field of the action that a reply is the value of, `observation_field` the field that is shown. `tools=True` offers the
        server's MCP tools to the agent. `on_error`: whether a step that raises on the server fails the episode or is shown to the
        agent. `headers` go with every request, such as Authorization. `timeout_s` bounds one message, `wait_s` the wait for a free
        session.
        """
        super().__init__()
        if not server.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"server={server!r} is no URL; write http://HOST:PORT.")
        if on_error not in ("fail", "observe"):
            raise ConfigError(f"on_error={on_error!r}; it is 'fail' or 'observe'.")
        self.server, self.tools = server.rstrip("/"), tools
        self._reset_args = dict(reset_args or {})
        self._action_field, self._observation_field = action_field, observation_field
        self._invalid_reward, self._on_error = float(invalid_reward), on_error
        self._limits = dict(headers or {}), timeout_s, wait_s
        self._given_prompt = system_prompt
        self._told_prompt: str | None = None
        self._form: ActionFormat | None = None
        self._connection: Connection | None = None
        self._seed: int | None = None
        self._played: list[tuple[str, Any]] = []
        """The messages sent since reset: ("reply", text) or ("tool", [name, arguments])."""
        self._found_tools: list[dict[str, Any]] = []
        self._pending, self._is_done = 0.0, False
        """Rewards of tool calls since the last action, and whether one of them ended the episode."""
        self._obs: Observation = ""
        self._legal: list[str] | None = None

    @property
    def suggested_sysprompt(self) -> str | None:
        """The given one, else the server's, with the format of actions where the server has told it."""
        if self._given_prompt is not None:
            return self._given_prompt
        form = "" if self._form is None or self._is_only_tools else self._form.in_words()
        if self._found_tools and not self.tools:
            form += f"\n\nTools:\n{json.dumps(self._found_tools, ensure_ascii=False)}"
        told = self._told_prompt
        if told and self._form is not None and self._form.is_plain_text:
            return told
        return f"{told or ''}\n\n{form}".strip() or None

    def env_current_obs(self) -> Observation:
        return self._obs

    def legal_actions(self, agent_id: str) -> list[str] | None:
        """Those that the server lists in its observation or its schema."""
        if not self.active_agents:
            return []
        return self._legal if self._legal is not None else self._form.choices if self._form is not None else None

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        if not self.tools:
            return ()
        return [
            tool_from_schema(
                tool["name"],
                tool["description"],
                _with_null(tool["parameters"]),
                partial(self._call_tool, tool["name"]),
                timeout_s=None,  # messages have a limit
            )
            for tool in self._found_tools
        ]

    async def state(self) -> dict[str, Any]:
        """The server's state of the running episode."""
        connection = await self._open()
        return dict(await connection.ask("state"))

    # --- the interface of SingleAgentEnv ---

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        await self.async_close()
        self._seed, self._played = None if seed is None else seed % MAX_SEED, []
        return await self._begin()

    async def async_env_step(self, action: str) -> StepOutcome:
        await self._open()
        self._played.append(("reply", action))
        outcome = await self._reply(action)
        self._obs = outcome.obs
        return outcome

    async def async_close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # --- an episode ---

    async def _open(self) -> "Connection":
        """The session; a copy of an env in the middle of an episode opens one and replays what was sent."""
        if self._connection is None:
            await self._begin()
            for kind, sent in self._played:
                await (self._reply(sent) if kind == "reply" else self._send_call(*sent))
        assert self._connection is not None, "_begin opens one"
        return self._connection

    async def _begin(self) -> tuple[Observation, Info]:
        start = {} if self._seed is None else {"seed": self._seed}
        self._connection, first = await Connection.open(self.server, {**start, **self._reset_args}, *self._limits)
        connection = self._connection
        if self._form is None:
            self._form = ActionFormat(await connection.get("schema"), self.server, self._action_field)
        self._pending, self._is_done = 0.0, False
        self._found_tools = await connection.list_tools() if self.tools or self._is_only_tools else []
        if self.tools and not self._found_tools:
            raise ConfigError(f"tools=True, but the OpenEnv server {self.server} offers no MCP tools. Leave tools out.")
        if first.get("done"):
            raise OpenEnvError(f"The OpenEnv server {self.server} ended the episode at reset: {first!r:.200}")
        about = first.get("metadata") or {}
        self._told_prompt = prompt if isinstance(prompt := about.get("system_prompt"), str) else None
        self._obs = self._shown(first)
        return self._obs, {"metadata": as_json(about)}

    @property
    def _is_only_tools(self) -> bool:
        return self._form is not None and self._form.is_tool_call

    async def _reply(self, said: str) -> StepOutcome:
        assert self._form is not None and self._connection is not None, "_begin sets both"
        reward, self._pending = self._pending, 0.0
        if self._is_done or (self.tools and self._is_only_tools):  # the last reply of an agent that acts by tools
            return StepOutcome(_OVER, reward, terminated=True, info={"illegal_move": False, "metadata": {}})
        try:
            answer = await self._connection.ask("step", self._form.read(said))
        except UnreadableAction as problem:
            return self._refused(str(problem), reward)
        except OpenEnvError as error:
            if error.code == "VALIDATION_ERROR":
                return self._refused(f"The action is not valid. {error}", reward)
            if error.code == "EXECUTION_ERROR" and self._on_error == "observe":
                return self._refused(f"The action failed. {error}", reward)
            raise
        about, is_done = answer.get("metadata") or {}, bool(answer.get("done"))
        is_cut = is_done and about.get("truncated") is True
        reward += float(answer.get("reward") or 0.0)
        info: Info = {"illegal_move": False, "metadata": as_json(about)}
        return StepOutcome(self._shown(answer), reward, truncated=is_cut, terminated=is_done and not is_cut, info=info)

    def _refused(self, why: str, reward: float) -> StepOutcome:
        assert self._form is not None, "set before the first reply"
        obs = f"{why} {self._form.in_words()}"
        return StepOutcome(obs, reward + self._invalid_reward, info={"illegal_move": True, "metadata": {}})

    def _shown(self, answer: Mapping[str, Any]) -> Observation:
        seen = answer.get("observation") or {}
        legal = seen.get("legal_actions")
        self._legal = legal if isinstance(legal, list) and legal and all(isinstance(a, str) for a in legal) else None
        if self._observation_field is not None:
            if self._observation_field not in seen:
                raise ConfigError(
                    f"observation_field={self._observation_field!r}, but the OpenEnv server {self.server} shows {sorted(seen)}."
                )
            return _in_text(seen[self._observation_field])
        shown = {name: value for name, value in seen.items() if name not in _NOT_SHOWN}
        return _in_text(next(iter(shown.values())) if len(shown) == 1 else shown)

    # --- tools ---

    async def _call_tool(self, name: str, /, **arguments: Any) -> str:
        await self._open()
        arguments = {key: value for key, value in arguments.items() if value is not None}
        self._played.append(("tool", [name, arguments]))
        return await self._send_call(name, arguments)

    async def _send_call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._form is not None and self._connection is not None, "_begin sets both"
        if self._is_done:
            return _OVER
        if not self._form.takes_tool_calls:
            return _result_text(await self._connection.rpc("tools/call", {"name": name, "arguments": arguments}))
        answer = await self._connection.ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        self._pending += float(answer.get("reward") or 0.0)
        self._is_done = bool(answer.get("done"))
        seen = answer.get("observation") or {}
        problem = (seen.get("error") or {}).get("message")
        return f"Error: {problem}" if problem else _result_text(seen.get("result"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}


def _with_null(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with null for every optional argument: models write it for one that they leave out."""
    required = set(parameters.get("required", ()))
    given = parameters.get("properties", {})
    optional = {
        name: {
            "anyOf": [{key: value for key, value in schema.items() if key != "description"}, {"type": "null"}],
            **{key: value for key, value in schema.items() if key == "description"},
        }
        for name, schema in given.items()
        if name not in required and isinstance(schema, Mapping)
    }
    return {**parameters, "properties": {**given, **optional}}


def _in_text(value: Any) -> str:
    return value if isinstance(value, str) else as_text(value)


def _result_text(result: Any) -> str:
    """A tool's result as text, in any of the shapes that MCP servers and OpenEnv give it."""
    if isinstance(result, Mapping):
        if result.get("data") is not None:
            result = result["data"]
        elif isinstance(parts := result.get("content"), list):
            return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        elif "result" in result and "tool_name" in result:
            return _result_text(result["result"])
    return result if isinstance(result, str) else json.dumps(as_json(result), ensure_ascii=False)
