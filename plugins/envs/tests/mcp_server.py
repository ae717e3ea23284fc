"""An MCP server for the tests, a separate process, written with the official package."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent
from pydantic import BaseModel

server = MCPServer("test")


class Point(BaseModel):
    x: int
    y: int = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool(name="geo.mirror")
def mirror(point: Point) -> Point:
    """Mirror a point at the origin."""
    return Point(x=-point.x, y=-point.y)


@server.tool()
def refuse(what: str) -> str:
    """Refuse."""
    raise ToolError(f"no {what} today")  # the message of another exception stays on the server, from mcp 2.1 on


@server.tool()
async def sleep() -> str:
    """Sleep for very long."""
    await asyncio.sleep(600)
    return "awake"


@server.tool()
def picture() -> ImageContent:
    """A picture."""
    return ImageContent(type="image", data="AAAA", mime_type="image/png")


@server.tool()
def environment() -> str:
    """What it was told."""
    return os.environ.get("TOLD", "nothing")


@server.tool()
def die() -> str:
    """Die."""
    sys.stderr.write("I have lost my database\n")
    sys.stderr.flush()
    os._exit(1)


server.run("stdio")
