"""Converts OpenAI-style tool schemas to Ludic tools and back.

Python types are derived from the schema's JSON types where possible, so that arguments are checked and converted before a
handler gets them, as with any tool.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, Literal

import msgspec

from ludic.tools.schema import inlined
from ludic.tools.tool import Tool, as_tool
from ludic.types.errors import ConfigError

Handler = Callable[..., Any]
"""Called with the arguments by name; sync or async."""
_PLAIN: Mapping[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "null": None, "array": list, "object": dict,
}  # fmt: skip


def tools_from_openai(
    schemas: Sequence[Mapping[str, Any]], handlers: Mapping[str, Handler], *, timeout_s: float | None = 30.0
) -> list[Tool]:
    """One tool per schema, `{"type": "function", "function": {…}}` or without the inner level."""
    functions = [_function(schema) for schema in schemas]
    names = [str(function["name"]) for function in functions]
    missing, unused = sorted(set(names) - set(handlers)), sorted(set(handlers) - set(names))
    if missing or unused or len(set(names)) != len(names):
        raise ConfigError(
            f"Schemas and handlers do not belong together: the schemas name {names}, the handlers {sorted(handlers)}. "
            "Give every name one schema and one handler."
        )
    return [
        tool_from_schema(
            name, str(function.get("description", "")), function.get("parameters"), handlers[name], timeout_s=timeout_s
        )
        for name, function in zip(names, functions, strict=True)
    ]


def tools_to_openai(tools: Iterable[Tool | Handler]) -> tuple[list[dict[str, Any]], dict[str, Handler]]:
    """(schemas, handlers): what `tools_from_openai` takes."""
    made = [as_tool(tool) for tool in tools]
    return [tool.schema for tool in made], {tool.name: tool.fn for tool in made}


def tool_from_schema(
    name: str,
    description: str,
    parameters: Mapping[str, Any] | None,
    handler: Handler,
    *,
    timeout_s: float | None = 30.0,
) -> Tool:
    """A tool whose arguments are described by a JSON schema of an object."""
    schema = _whole(name, parameters or {})
    return Tool(
        name=name,
        description=description or f"Call the tool {name}.",
        parameters=schema,
        fn=handler,
        timeout_s=timeout_s,
        types={key: kind for key, sub in schema["properties"].items() if (kind := _type_of(sub)) is not Any},
    )


def _function(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    function = schema.get("function", schema)
    if schema.get("type") != "function" or not isinstance(function, Mapping) or "name" not in function:
        raise ConfigError(
            f'{schema!r:.120} is not the schema of a function: {{"type": "function", "function": {{"name": …, '
            '"description": …, "parameters": …}}.'
        )
    return function


def _whole(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without references, with the keys that Ludic expects."""
    given = {"$defs": {**parameters.get("definitions", {}), **parameters.get("$defs", {})}, **parameters}
    given.pop("definitions", None)
    try:
        schema = inlined(given)
    except KeyError as error:
        raise ConfigError(f"The schema of the tool {name!r} refers to {error}, which it does not define.") from error
    if schema.setdefault("type", "object") != "object":
        raise ConfigError(f"The parameters of the tool {name!r} are of type {schema['type']!r}; it must be 'object'.")
    return {**schema, "properties": schema.get("properties", {}), "required": list(schema.get("required", ()))}


def _type_of(schema: Any) -> Any:
    """The Python type of a schema; Any (unchecked) if no type expresses it."""
    kind = _spelled_out(schema) if isinstance(schema, Mapping) else Any
    try:
        msgspec.json.schema(kind)
    except (TypeError, ValueError):  # msgspec cannot tell the members of every union apart
        return Any
    return kind


def _spelled_out(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        values = schema["enum"]
        return Literal[tuple(values)] if all(isinstance(v, str | int | None) for v in values) else Any
    kinds = schema.get("type", schema.get("anyOf", schema.get("oneOf", ())))
    members = [kinds] if isinstance(kinds, str) else kinds
    found = [_type_of(m) if isinstance(m, Mapping) else _one(m, schema) for m in members]
    return Any if not found or Any in found else reduce(or_, (type(None) if f is None else f for f in found))


def _one(name: str, schema: Mapping[str, Any]) -> Any:
    kind = _PLAIN.get(name, Any)
    return list[_type_of(schema["items"])] if kind is list and "items" in schema else kind  # type: ignore[misc]
