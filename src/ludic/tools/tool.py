"""A tool: a Python callable that a model can call by name.

The signature is the contract. It gives the JSON schema that the model reads, and it decides what arrives:
arguments are checked and converted before the callable sees them, and whatever goes wrong on the way becomes
a text that tells the model what to do. Which tools an agent has, and where results go, is up to ludic.agents.

Only the wait is bounded by `timeout_s`: Python cannot kill a thread, so a sync tool that never returns keeps
its daemon thread until the process ends. Code that is not trusted belongs in a sandbox, not in a tool.
"""

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import json
import logging
import re
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from ludic.types.errors import ConfigError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what chat templates and the OpenAI API accept
_MAX_DETAIL = 1000  # characters of an exception's message that are worth a place in the prompt
_GRACE_S = 1.0  # how long a cancelled async tool may take for its clean-up


@dataclasses.dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model gets back. A tool may return one itself, to report an error without raising."""

    content: str
    is_error: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A callable with the schema a model needs to call it; usually made with `Tool.from_callable`."""

    name: str
    description: str
    parameters: dict[str, Any] = dataclasses.field(hash=False)
    """JSON schema of the arguments: `{"type": "object", "properties": …, "required": …}`."""
    fn: Callable[..., Any]
    """Called with keyword arguments. Async: awaited. Sync: run in a thread of its own."""
    timeout_s: float | None = 30.0
    """How long one call may take; None waits for ever."""
    types: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, repr=False)
    """Python type of each argument. An argument without one (a hand-written schema) is passed as it comes."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot be the name of a tool: use 1 to 64 letters, digits, _ or -, for example by "
                "passing name= to Tool.from_callable."
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                f"Tool {self.name!r} has timeout_s={self.timeout_s}; use seconds above 0, or None for no limit."
            )

    @classmethod
    def from_callable(
        cls,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = 30.0,
    ) -> "Tool":
        """Read name, description and parameters from a function, method, partial or callable object.

        The description is the first paragraph of the docstring; a Google-style `Args:` block describes the
        parameters. Arguments bound by a partial are hidden from the model.
        """
        if not callable(fn):
            raise ConfigError(f"A tool must be callable, got {type(fn).__name__}: {fn!r}.")
        name = name or _name_of(fn)
        doc = inspect.cleandoc(_doc_of(fn))
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
                prop |= _default(parameter.default)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(parameter)
            properties[parameter.name] = prop
        return cls(
            name=name,
            description=description or _summary(doc) or f"Call the tool {name}.",
            parameters={"type": "object", "properties": properties, "required": required},
            fn=_by_keyword(fn, positional) if positional else fn,
            timeout_s=timeout_s,
            types=types,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the OpenAI shape; a copy, which may be changed freely."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Run the tool on what the model sent. Raises only when the caller itself is cancelled."""
        try:
            kwargs = self._read(arguments)
        except _BadArguments as error:
            return ToolResult(f"Error: {error} {self._usage()}", is_error=True)
        # A task of its own, so that a tool which swallows its cancellation cannot hold the caller,
        # and a CancelledError raised inside the tool is told apart from one meant for the caller.
        task = asyncio.create_task(self._run(kwargs))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
        if not done:
            return ToolResult(
                f"Error: {self.name} did not finish within {self.timeout_s:g} s. "
                "Try again with less work in one call, or go on without it.",
                is_error=True,
            )
        if task.cancelled():
            return ToolResult(f"Error: {self.name} was cancelled before it finished. Go on without it.", is_error=True)
        return task.result()

    async def _run(self, kwargs: dict[str, Any]) -> ToolResult:
        try:
            if _is_async(self.fn):
                value = await self.fn(**kwargs)
            else:
                value = await _in_daemon_thread(lambda: self._run_sync(kwargs), name=f"ludic-tool-{self.name}")
            while inspect.isawaitable(value):
                value = await value
            return _as_result(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool's failure is something the model reads
            return self._failed(error)

    def _run_sync(self, kwargs: dict[str, Any]) -> Any:
        """The thread's side: a ToolResult, or an awaitable that has to go back to the event loop."""
        try:
            value = self.fn(**kwargs)
            return value if inspect.isawaitable(value) else _as_result(value)
        except BaseException as error:  # noqa: BLE001 - nothing above this frame could report it
            return self._failed(error)

    def _failed(self, error: BaseException) -> ToolResult:
        logger.debug("tool %s failed", self.name, exc_info=error)
        try:
            detail = str(error)
        except Exception:  # noqa: BLE001 - an exception whose __str__ raises
            detail = ""
        if len(detail) > _MAX_DETAIL:
            detail = detail[:_MAX_DETAIL] + " …"
        text = f"Error: {self.name} failed with {type(error).__name__}{': ' if detail else ''}{detail}"
        return ToolResult(
            _encodable(f"{text}\nCorrect the arguments and call it again, or go on without it."), is_error=True
        )

    def _usage(self) -> str:
        if not self.parameters.get("properties"):
            return f"{self.name} takes no arguments. Call it again with {{}}."
        return (
            f"{self.name} accepts: {_fields(self.parameters)}. Call it again with one JSON object of these arguments."
        )

    def _read(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Decoded and converted arguments; every problem at once, so that one more call can put all right."""
        given = _decode(arguments)
        problems = [f"unknown argument {path!r}" for path in _unknown_keys(self.parameters, given)]
        problems += [f"missing argument {n!r}" for n in self.parameters.get("required", ()) if n not in given]
        kwargs = dict(given)
        for name, kind in self.types.items():
            if name not in given:
                continue  # the callable's own default applies
            try:
                kwargs[name] = _convert(given[name], kind)
            except msgspec.ValidationError as error:
                text, _, path = str(error).partition(" - at `$")
                problems.append(f"argument {name + path.rstrip('`')!r}: {text}")
            except Exception as error:  # noqa: BLE001 - a dataclass argument runs its own __post_init__
                problems.append(f"argument {name!r}: {type(error).__name__}: {error}")
        if problems:
            raise _BadArguments(f"{'; '.join(problems)}.")
        return kwargs


def as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """A Tool as it is; anything else through `Tool.from_callable`."""
    return tool if isinstance(tool, Tool) else Tool.from_callable(tool)


def tool_schema(tool: Tool | Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI-shaped schema of a callable."""
    return as_tool(tool).schema


# ---------------------------------------------------------------------------------------------- reading a callable


def _innermost(fn: Any) -> Any:
    """What a chain of partials finally calls."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _name_of(fn: Any) -> str:
    inner = _innermost(fn)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _doc_of(fn: Any) -> str:
    # Not inspect.getdoc: for a __call__ without docstring it finds object's "Call self as a function."
    inner = _innermost(fn)
    if hasattr(inner, "__name__"):
        return inner.__doc__ or ""
    owner = type(inner)
    made_by_dataclass = (owner.__doc__ or "").startswith(f"{owner.__name__}(")
    return owner.__call__.__doc__ or ("" if made_by_dataclass else owner.__doc__) or ""


def _is_async(fn: Any) -> bool:
    inner = _innermost(fn)
    return any(inspect.iscoroutinefunction(f) for f in (inner, type(inner).__call__))


def _by_keyword(fn: Callable[..., Any], positional: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Let a callable with positional-only parameters take them by name, like any other tool."""

    def call(**kwargs: Any) -> Any:
        return fn(*[kwargs.pop(p.name, p.default) for p in positional], **kwargs)

    return call


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
            kind = kind | None  # `limit: int = None` is often written, and models send null for it
        msgspec.json.Decoder(kind)  # raises where the schema alone would pass, e.g. for Literal[True]
        return kind, _inlined(msgspec.json.schema(kind))
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
            with contextlib.suppress(ValueError):  # empty: the name is assigned further down
                scope[name] = cell.cell_contents
    holder = SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, getattr(inner, "__globals__", {}), scope, include_extras=True)["it"]


def _default(value: Any) -> dict[str, Any]:
    """The schema's "default", left out where JSON cannot express it."""
    try:
        return {"default": json.loads(json.dumps(msgspec.to_builtins(value), allow_nan=False))}
    except (TypeError, ValueError):
        return {}


def _inlined(
    schema: dict[str, Any], defs: Mapping[str, Any] | None = None, inside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The schema without references, which chat templates print but do not follow.

    A type that contains itself is spelled out once; deeper occurrences only say that they are objects.
    """
    defs = schema.get("$defs", {}) if defs is None else defs
    result: dict[str, Any] = {}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            return {"type": "object"}
        result = _inlined(defs[name], defs, (*inside, name))
    for key, value in schema.items():
        match key:
            case "$ref" | "$defs" | "title":
                continue
            case "properties":
                result[key] = {name: _inlined(sub, defs, inside) for name, sub in value.items()}
            case "anyOf" | "prefixItems":
                result[key] = [_inlined(sub, defs, inside) for sub in value]
            case "items" | "additionalProperties" if isinstance(value, dict):
                result[key] = _inlined(value, defs, inside)
            case _:
                result[key] = value
    if "enum" in result and "type" not in result:  # some chat templates print the type of every parameter
        kinds = {type(value) for value in result["enum"]}
        result |= {"type": "string"} if kinds == {str} else {"type": "integer"} if kinds == {int} else {}
    return result


# --------------------------------------------------------------------------------------------- reading a docstring

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*)")


def _summary(doc: str) -> str:
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


# --------------------------------------------------------------------------------------------- reading arguments


class _BadArguments(Exception):
    """What is wrong with the arguments, in words for the model."""


def _decode(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    value: Any = arguments
    for _ in range(2):  # some models and parsers encode the object twice
        if isinstance(value, str):
            try:
                # strict=False: models put raw newlines into strings, most of all into code
                value = json.loads(value, strict=False) if value.strip() else {}
            except (ValueError, RecursionError) as error:
                raise _BadArguments(f"the arguments are not valid JSON ({error}).") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _BadArguments(f"the arguments must be one JSON object, not {type(value).__name__}.")
    return dict(value)


def _convert(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        # A list or object may arrive as JSON text: from a model that quoted it, or from an XML-style call.
        if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
            raise
        try:
            decoded = json.loads(value, strict=False)
        except ValueError:
            decoded = value
        return msgspec.convert(decoded, kind, strict=False)


def _unknown_keys(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Paths of keys that the schema does not know. msgspec would drop those inside dataclasses silently."""
    kind = "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "scalar"
    shape = next((s for s in schema.get("anyOf", [schema]) if s.get("type") == kind), None)
    if shape is None:
        return  # a scalar, or something that the conversion is going to refuse
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


def _fields(schema: Mapping[str, Any]) -> str:
    """The properties of an object in words: `query (string), limit (integer, optional)`."""
    required = schema.get("required", ())
    return ", ".join(
        f"{name} ({_in_words(sub)}{'' if name in required else ', optional'})"
        for name, sub in schema["properties"].items()
    )


def _in_words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_in_words(sub) for sub in schema["anyOf"])
    if schema.get("properties"):
        return f"object with {_fields(schema)}"
    if isinstance(schema.get("items"), dict):
        return f"array of {_in_words(schema['items'])}"
    if "prefixItems" in schema:
        return f"array of {', '.join(_in_words(sub) for sub in schema['prefixItems'])}"
    return str(schema.get("type", "any value"))


# ------------------------------------------------------------------------------------------ running and answering


async def _in_daemon_thread(work: Callable[[], Any], *, name: str) -> Any:
    """Run `work`, which must not raise, in a thread that cannot keep the interpreter from exiting.

    The default executor would: the interpreter joins its threads on exit, and one hung tool would hang the run.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(outcome: Any) -> None:
        if not answer.done():
            answer.set_result(outcome)
        elif inspect.iscoroutine(outcome):
            outcome.close()  # nobody waits any more; unclosed, it would warn that it was never awaited

    def run() -> None:
        outcome = work()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name=name).start()
    return await answer


def _as_result(value: Any) -> ToolResult:
    return value if isinstance(value, ToolResult) else ToolResult(_encodable(_text(value)))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the text itself, also of a str enum
    if isinstance(value, dict | list | tuple | bool | int | float) or _is_dataclass_instance(value):
        with contextlib.suppress(TypeError, ValueError):  # keys JSON cannot have, a list that contains itself
            return json.dumps(value, default=_plain, ensure_ascii=False)
    return str(value)


def _plain(value: Any) -> Any:
    if _is_dataclass_instance(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _encodable(text: str) -> str:
    """Lone surrogates replaced: tokenizers and files refuse them, and one odd byte must not cost the episode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
