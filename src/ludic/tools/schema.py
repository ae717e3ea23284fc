"""JSON schemas of tools: read from a callable, and used to check and convert a model's arguments."""

import contextlib
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from ludic.types.errors import ConfigError
from ludic.util.files import parse_json


def _innermost(fn: Any) -> Any:
    """The callable inside a chain of partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def name_of(fn: Any) -> str:
    inner = _innermost(fn)
    return str(getattr(inner, "__name__", type(inner).__name__))


def doc_of(fn: Any) -> str:
    # Not inspect.getdoc: for a __call__ without docstring it finds object's "Call self as a function."
    inner = _innermost(fn)
    if hasattr(inner, "__name__"):
        return inner.__doc__ or ""
    owner = type(inner)
    made_by_dataclass = (owner.__doc__ or "").startswith(f"{owner.__name__}(")
    return owner.__call__.__doc__ or ("" if made_by_dataclass else owner.__doc__) or ""


def is_async(fn: Any) -> bool:
    inner = _innermost(fn)
    return any(inspect.iscoroutinefunction(f) for f in (inner, type(inner).__call__))


def described_parameters(fn: Any, name: str, doc: str) -> tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]:
    """The parameters' JSON schema, their Python types, and the callable, which takes them all by keyword."""
    described = _described_arguments(doc)
    properties: dict[str, Any] = {}
    types: dict[str, Any] = {}
    required, positional = [], []
    for parameter in _parameters_of(fn, name):
        types[parameter.name], prop = _type_and_schema(parameter, fn, name)
        if parameter.name in described:
            prop["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            prop |= _default_of(parameter.default)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(parameter)
        properties[parameter.name] = prop

    def by_keyword(**kwargs: Any) -> Any:
        return fn(*[kwargs.pop(p.name, p.default) for p in positional], **kwargs)

    schema = {"type": "object", "properties": properties, "required": required}
    return schema, types, by_keyword if positional else fn


def _parameters_of(fn: Any, name: str) -> Iterator[inspect.Parameter]:
    """The parameters that a model fills in."""
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ConfigError(f"Tool {name!r} is a generator; return its items in a list instead.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Tool {name!r} has no readable signature ({error}); wrap it in a function that has one."
        ) from error
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"Tool {name!r} has the parameter {str(parameter)!r}, but a model needs to know each argument by name. "
                "Use named parameters, or one parameter of type list or dict."
            )
        if parameter.name not in bound:
            yield parameter


def _type_and_schema(parameter: inspect.Parameter, fn: Any, tool_name: str) -> tuple[Any, dict[str, Any]]:
    if parameter.annotation is parameter.empty:
        return Any, {"type": "string"}
    try:
        kind = _resolve(parameter.annotation, fn)
        if kind in (Any, object):
            return Any, {"type": "string"}
        if parameter.default is None:
            kind = kind | None  # `limit: int = None` is common, and models send null for it
        return kind, inlined(msgspec.json.schema(kind)) or {"type": "string"}
    except Exception as error:
        raise ConfigError(
            f"Tool {tool_name!r}: the type of {str(parameter)!r} cannot be read from JSON ({error}). Use str, int, "
            "float, bool, list, dict, tuple, Literal, Enum, a dataclass defined at module level, or a union of these."
        ) from error


def _resolve(annotation: Any, fn: Any) -> Any:
    """An annotation with its strings (`from __future__ import annotations`, forward references) looked up."""
    inner = inspect.unwrap(_innermost(fn))
    inner = getattr(inner, "__func__", inner)
    if not inspect.isfunction(inner):  # a class, or an object with __call__
        inner = inspect.unwrap(getattr(inner, "__init__") if inspect.isclass(inner) else type(inner).__call__)  # noqa: B009 - mypy
    scope: dict[str, Any] = {}
    if inspect.isfunction(inner):
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell: the name is not assigned yet
                scope[name] = cell.cell_contents
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, getattr(inner, "__globals__", {}), scope, include_extras=True)["it"]


def _default_of(value: Any) -> dict[str, Any]:
    """The schema's "default", if JSON can express it."""
    try:
        return {"default": json.loads(json.dumps(msgspec.to_builtins(value), allow_nan=False))}
    except (TypeError, ValueError):
        return {}


def inlined(
    schema: dict[str, Any], defs: Mapping[str, Any] | None = None, inside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The schema without references, because chat templates do not resolve them.

    A recursive type is expanded once; deeper occurrences are plain objects.
    """
    defs = schema.get("$defs", {}) if defs is None else defs
    result: dict[str, Any] = {}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            return {"type": "object"}
        result = inlined(defs[name], defs, (*inside, name))
    for key, value in schema.items():
        match key:
            case "$ref" | "$defs" | "title":
                continue
            case "properties":
                result[key] = {name: inlined(sub, defs, inside) for name, sub in value.items()}
            case "anyOf" | "prefixItems":
                result[key] = [inlined(sub, defs, inside) for sub in value]
            case "items" | "additionalProperties" if isinstance(value, dict):
                result[key] = inlined(value, defs, inside)
            case _:
                result[key] = value
    if "enum" in result and "type" not in result:  # some chat templates print the type of every parameter
        kinds = {type(value) for value in result["enum"]}
        result |= {"type": "string"} if kinds == {str} else {"type": "integer"} if kinds == {int} else {}
    return result


# --- Python types of a schema ---

_PLAIN: Mapping[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "null": None, "array": list, "object": dict,
}  # fmt: skip


def type_of(schema: Any) -> Any:
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
    found = [type_of(m) if isinstance(m, Mapping) else _one(m, schema) for m in members]
    return Any if not found or Any in found else reduce(or_, (type(None) if f is None else f for f in found))


def _one(name: str, schema: Mapping[str, Any]) -> Any:
    kind = _PLAIN.get(name, Any)
    return list[type_of(schema["items"])] if kind is list and "items" in schema else kind  # type: ignore[misc]


# --- docstrings ---

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*)")


def summary_of(doc: str) -> str:
    """The first paragraph, on one line."""
    lines: list[str] = []
    for line in doc.splitlines():
        if not line.strip() or _SECTION.match(line):
            break
        lines.append(line.strip())
    return " ".join(lines)


def _described_arguments(doc: str) -> dict[str, str]:
    """Parameter descriptions from a Google-style `Args:` block."""
    found: dict[str, str] = {}
    lines = doc.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(r"(Args|Arguments|Parameters):\s*$", line)), len(lines))
    indent = name = None
    for line in lines[start + 1 :]:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        indent = depth if indent is None else indent
        entry = _ARGUMENT.match(line.strip()) if depth <= indent else None
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name is not None:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {name: text for name, text in found.items() if text}


# --- a model's arguments: decode JSON, check keys, convert values ---


class BadArguments(Exception):
    """All problems with the arguments, as a text for the model."""


def read_arguments(
    arguments: str | Mapping[str, Any], schema: Mapping[str, Any], types: Mapping[str, Any]
) -> dict[str, Any]:
    """Decoded and converted arguments; BadArguments reports all problems at once, so that one more call can fix them."""
    given = _decoded(arguments)
    problems = [f"unknown argument {path!r}" for path in _unknown_keys(schema, given)]
    problems += [f"missing argument {n!r}" for n in schema.get("required", ()) if n not in given]
    kwargs = dict(given)
    for name in filter(given.__contains__, types):  # for the others the callable's own default applies
        try:
            kwargs[name] = _converted(given[name], types[name])
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            problems.append(f"argument {name + path.rstrip('`')!r}: {text}")
        except Exception as error:  # noqa: BLE001 - a dataclass argument runs its own __post_init__
            problems.append(f"argument {name!r}: {type(error).__name__}: {error}")
    if problems:
        raise BadArguments(f"{'; '.join(problems)}.")
    return kwargs


def _decoded(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    value: Any = arguments
    for _ in range(2):  # some models and parsers encode the object twice
        if isinstance(value, str):
            try:
                # strict=False: models put raw newlines into strings, mostly in code
                value = parse_json(value, strict=False) if value.strip() else {}
            except ValueError as error:
                raise BadArguments(f"the arguments are not valid JSON ({error}).") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadArguments(f"the arguments must be one JSON object, not {type(value).__name__}.")
    return dict(value)


def _converted(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        # A list or object may arrive as JSON text, from a model that quotes it or from an XML-style call.
        if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
            raise
        try:
            decoded = parse_json(value, strict=False)
        except ValueError:
            decoded = value
        return msgspec.convert(decoded, kind, strict=False)


def _unknown_keys(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Paths of unknown keys. msgspec would silently drop those inside dataclasses."""
    kind = "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "scalar"
    shape = next((s for s in schema.get("anyOf", [schema]) if s.get("type") == kind), None)
    if shape is None:
        return  # a scalar, or a value that the conversion will refuse
    if kind == "array":
        for i, item in enumerate(value):
            if isinstance(shape.get("items"), dict):
                yield from _unknown_keys(shape["items"], item, f"{path}[{i}]")
        return
    known, others = shape.get("properties"), shape.get("additionalProperties", "properties" not in shape)
    for key, item in value.items():
        here = f"{path}.{key}" if path else str(key)
        if known is not None and key in known:
            yield from _unknown_keys(known[key], item, here)
        elif isinstance(others, dict):
            yield from _unknown_keys(others, item, here)
        elif not others:
            yield here


def in_words(schema: Mapping[str, Any]) -> str:
    """The properties of an object in words: `query (string), limit (integer, optional)`."""
    required = schema.get("required", ())
    return ", ".join(
        f"{name} ({_value_in_words(sub)}{'' if name in required else ', optional'})"
        for name, sub in schema["properties"].items()
    )


def _value_in_words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_value_in_words(sub) for sub in schema["anyOf"])
    if schema.get("properties"):
        return f"object with {in_words(schema)}"
    if isinstance(schema.get("items"), dict):
        return f"array of {_value_in_words(schema['items'])}"
    if "prefixItems" in schema:
        return f"array of {', '.join(_value_in_words(sub) for sub in schema['prefixItems'])}"
    return str(schema.get("type", "any value"))
