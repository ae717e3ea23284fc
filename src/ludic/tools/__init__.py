"""Tools: callables that a model can call, and the ones Ludic ships."""

from ludic.tools.calculator import calculator
from ludic.tools.tool import Tool, ToolResult, as_tool, tool_schema

__all__ = ["Tool", "ToolResult", "as_tool", "tool_schema", "calculator"]
