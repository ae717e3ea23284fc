"""The tools of an MCP server as Ludic tools; the server is a child process connected over stdin and stdout.

    async with mcp_tools(["npx", "-y", "@modelcontextprotocol/server-filesystem", "."]) as tools:
        agent = ReActAgent(tools=tools, …)

One server may serve any number of agents in the event loop that started it. Its state (files, a database) is shared by all their
episodes. It has all rights of its user: a server is not a sandbox.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Any

from ludic.tools.tool import Tool, ToolResult, tool_from_schema
from ludic.types.errors import ConfigError, MissingExtra

_MAX_NAME = 64
_MAX_STDERR = 4096


@asynccontextmanager
async def mcp_tools(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    prefix: str = "",
    timeout_s: float | None = 30.0,
    start_timeout_s: float = 60.0,
) -> AsyncIterator[list[Tool]]:
    """Start the server, yield its tools, and stop it; enter and leave in the same task.

    `env` is added to the few variables that a server inherits. `prefix` goes before every tool name, to distinguish servers.
    `timeout_s` bounds one call. After the server dies, calls return an error message to the model.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(
            f"The command of an MCP server is a list of words, such as ['python', 's.py'], not {command!r}."
        )
    failure: Exception | None = None
    has_started = False
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            async with AsyncExitStack() as stack:
                client = _client(command, env, cwd, said)
                try:
                    async with asyncio.timeout(start_timeout_s):
                        await stack.enter_async_context(client)
                        tools = [_tool(client, one, prefix, said, timeout_s) for one in await _all_tools(client)]
                    has_started = True
                    yield tools
                except Exception as error:  # noqa: BLE001 - raised here, the package would wrap it in exception groups
                    failure = error
        except ExceptionGroup as error:  # of the package, when the connection ends otherwise than agreed
            if failure is None:
                raise ConfigError(_why_failed(command, error, said, start_timeout_s, has_started)) from error
        if failure is not None and not has_started:
            raise ConfigError(_why_failed(command, failure, said, start_timeout_s, has_started)) from failure
    if failure is not None:
        raise failure


def _client(command: Sequence[str], env: Mapping[str, str] | None, cwd: str | Path | None, said: IO[str]) -> Any:
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ImportError as error:
        raise MissingExtra("mcp", "Tools of an MCP server") from error
    server = StdioServerParameters(command=command[0], args=list(command[1:]), env=dict(env or {}), cwd=cwd)
    return Client(stdio_client(server, said))  # type: ignore[arg-type]


async def _all_tools(client: Any) -> list[Any]:
    """All pages of the tool list."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _tool(client: Any, listed: Any, prefix: str, said: IO[str], timeout_s: float | None) -> Tool:
    from mcp import MCPError

    async def call(**arguments: Any) -> ToolResult:
        try:
            result = await client.call_tool(listed.name, arguments)
        except (MCPError, RuntimeError) as error:  # the server is gone, refuses, or breaks the protocol
            failed = f"Error: {listed.name} could not be called: {error}.{_last_line(said)} Go on without it."
            return ToolResult(failed, is_error=True)
        return ToolResult(_text(result), is_error=bool(result.is_error))

    name = re.sub(r"[^A-Za-z0-9_-]", "_", prefix + listed.name)[:_MAX_NAME]
    description = listed.description or listed.title or ""
    return tool_from_schema(name, description, listed.input_schema, call, timeout_s=timeout_s)


def _text(result: Any) -> str:
    """The server's answer as text."""
    from mcp.types import EmbeddedResource, TextContent, TextResourceContents

    pieces = []
    for block in result.content:
        if isinstance(block, TextContent):
            pieces.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            pieces.append(block.resource.text)
        else:
            pieces.append(f"[{block.type}, which cannot be shown as text]")
    return "\n".join(pieces)


def _why_failed(
    command: Sequence[str], error: BaseException, said: IO[str], start_timeout_s: float, has_started: bool
) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    what = f"it did not answer within {start_timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
    failed = "has failed" if has_started else "could not be started"
    return f"The MCP server {' '.join(command)!r:.200} {failed}: {what}.{_last_line(said)}"


def _last_line(said: IO[str]) -> str:
    """The last line that the server wrote to stderr, often the reason."""
    if said.closed:  # the server was stopped, and an agent still holds its tools
        return ""
    # pread, not read: reading would move the file position at which the server writes.
    size = os.fstat(said.fileno()).st_size
    end = os.pread(said.fileno(), _MAX_STDERR, max(0, size - _MAX_STDERR))
    lines = end.decode("utf-8", "replace").strip().splitlines()
    return f" Its last line on stderr: {lines[-1]:.300}" if lines else ""
