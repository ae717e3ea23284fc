"""Tools: callables that a model can call, their schemas and their safe execution, and the built-in ones.

`agents` and `envs` import it. Start with tool.py.
"""

from ludic.tools.calculator import calculator
from ludic.tools.tool import Tool, ToolResult, as_tool, tool_schema, tools_from_openai, tools_to_openai

__all__ = ["Tool", "ToolResult", "as_tool", "tool_schema", "tools_from_openai", "tools_to_openai", "calculator"]
