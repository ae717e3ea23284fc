"""Reads name, description and JSON schema of the parameters from a callable."""

import contextlib
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from ludic.types.errors import ConfigError


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


def by_keyword(fn: Callable[..., Any], positional: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Wrap a callable with positional-only parameters so that it takes them by name."""

    def call(**kwargs: Any) -> Any:
        return fn(*[kwargs.pop(p.name, p.default) for p in positional], **kwargs)

    return call


def parameters_of(fn: Any, name: str) -> Iterator[inspect.Parameter]:
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


def type_and_schema(parameter: inspect.Parameter, fn: Any, tool_name: str) -> tuple[Any, dict[str, Any]]:
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


def default_of(value: Any) -> dict[str, Any]:
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


def described_arguments(doc: str) -> dict[str, str]:
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
