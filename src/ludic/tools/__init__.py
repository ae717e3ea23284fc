"""Tools: callables that a model can call, their schemas and their safe execution, and the built-in ones.

`agents` and `envs` import it. Start with tool.py.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy
from ludic.tools.tool import Tool, ToolResult, as_tool, tool_schema, tools_from_openai, tools_to_openai

if TYPE_CHECKING:
    from ludic.tools.calculator import calculator

__all__ = ["Tool", "ToolResult", "as_tool", "tool_schema", "tools_from_openai", "tools_to_openai", "calculator"]

__getattr__ = lazy(__name__, {"calculator": "calculator"})
