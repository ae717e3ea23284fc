"""A client's connection to an OpenEnv server: one WebSocket, which is one session and one env there."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

from ludic.types import LudicError, MissingExtra
from ludic.util.files import parse_json

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
