"""Tools of an env at the prompt of `ludic play`: `/search first president`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ludic.tools import as_tool


class Toolbox:
    """The tools that a line starting with / calls."""

    def __init__(self, tools: Sequence[Callable[..., Any]]) -> None:
        self._tools = {tool.name: tool for tool in map(as_tool, tools)}

    @property
    def usage(self) -> str:
        """One line of usage; empty without tools."""
        return ", ".join(
            f"/{tool.name} {' '.join(tool.parameters['properties'])}".strip() for tool in self._tools.values()
        )

    async def answer(self, text: str) -> str | None:
        """The answer to a line that calls a tool; None if the line is for the env."""
        if not self._tools or not text.startswith("/"):
            return None
        name, _, rest = text[1:].partition(" ")
        tool = self._tools.get(name)
        if tool is None:
            return f"There is no tool {name!r}. Tools: {self.usage}"
        return (await tool.call(_arguments(rest.strip(), list(tool.parameters["properties"])))).content


def _arguments(text: str, names: list[str]) -> str:
    """A JSON object as it is; any other text is the first argument."""
    if text.startswith("{") or not names:
        return text
    return json.dumps({names[0]: text} if text else {})
