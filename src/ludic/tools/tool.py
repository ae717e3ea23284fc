"""A tool: a Python callable that a model can call by name.

The signature defines the JSON schema that the model reads. Arguments are checked and converted before the callable gets them, and
every error becomes a text that tells the model what to do. ludic.agents decides which tools an agent has.

`timeout_s` bounds only the wait: Python cannot kill a thread, so a sync tool that never returns keeps its daemon thread until the
process ends. Untrusted code belongs in a sandbox, not in a tool.
"""

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import inspect
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ludic.tools.schema import (
    by_keyword,
    default_of,
    described_arguments,
    doc_of,
    is_async,
    name_of,
    parameters_of,
    summary_of,
    type_and_schema,
)
from ludic.types.errors import ConfigError
from ludic.types.messages import encodable

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what chat templates and the OpenAI API accept
_MAX_DETAIL = 1000  # characters of an error message in the prompt
_GRACE_S = 1.0  # time for the clean-up of a cancelled async tool

# --- running sync tools, and text of results ---


async def in_daemon_thread(work: Callable[[], Any], *, name: str) -> Any:
    """Run `work`, which must not raise, in a daemon thread.

    The interpreter joins the threads of the default executor on exit, so there a hung tool would hang the run.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(outcome: Any) -> None:
        if not answer.done():
            answer.set_result(outcome)
        elif inspect.iscoroutine(outcome):
            outcome.close()  # the caller has given up; unclosed, Python warns that it was never awaited

    def run() -> None:
        outcome = work()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name=name).start()
    return await answer


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # also for a str enum
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


# --- reading a model's arguments: decode JSON, check keys, convert values ---


class BadArguments(Exception):
    """All problems with the arguments, as a text for the model."""


def decode(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    value: Any = arguments
    for _ in range(2):  # some models and parsers encode the object twice
        if isinstance(value, str):
            try:
                # strict=False: models put raw newlines into strings, mostly in code
                value = json.loads(value, strict=False) if value.strip() else {}
            except (ValueError, RecursionError) as error:
                raise BadArguments(f"the arguments are not valid JSON ({error}).") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadArguments(f"the arguments must be one JSON object, not {type(value).__name__}.")
    return dict(value)


def convert(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        # A list or object may arrive as JSON text, from a model that quotes it or from an XML-style call.
        if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
            raise
        try:
            decoded = json.loads(value, strict=False)
        except ValueError:
            decoded = value
        return msgspec.convert(decoded, kind, strict=False)


def unknown_keys(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Paths of unknown keys. msgspec would silently drop those inside dataclasses."""
    kind = "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "scalar"
    shape = next((s for s in schema.get("anyOf", [schema]) if s.get("type") == kind), None)
    if shape is None:
        return  # a scalar, or a value that the conversion will refuse
    if kind == "array":
        for i, item in enumerate(value):
            if isinstance(shape.get("items"), dict):
                yield from unknown_keys(shape["items"], item, f"{path}[{i}]")
        return
    known, others = shape.get("properties"), shape.get("additionalProperties", "properties" not in shape)
    for key, item in value.items():
        here = f"{path}.{key}" if path else str(key)
        if known is not None and key in known:
            yield from unknown_keys(known[key], item, here)
        elif isinstance(others, dict):
            yield from unknown_keys(others, item, here)
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


# --- tools ---


@dataclasses.dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer to the model. A tool may return one to report an error without raising."""

    content: str
    is_error: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A callable and its schema; usually made with `Tool.from_callable`."""

    name: str
    description: str
    parameters: dict[str, Any] = dataclasses.field(hash=False)
    """JSON schema of the arguments: `{"type": "object", "properties": …, "required": …}`."""
    fn: Callable[..., Any]
    """Called with keyword arguments. Async functions are awaited, sync functions run in a thread."""
    timeout_s: float | None = 30.0
    """Time limit of one call; None: no limit."""
    types: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, repr=False)
    """Python type of each argument. An argument without one (a hand-written schema) is passed unchanged."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot be the name of a tool: use 1 to 64 letters, digits, _ or -, for example by "
                "passing name= to Tool.from_callable."
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
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
            raise ConfigError(
                f"A tool must be callable, got {type(fn).__name__}: {fn!r}. "
                "A registered one is made by name: registry.tools.make('calculator')."
            )
        name = name or name_of(fn)
        doc = inspect.cleandoc(doc_of(fn))
        described = described_arguments(doc)
        properties: dict[str, Any] = {}
        types: dict[str, Any] = {}
        required, positional = [], []
        for parameter in parameters_of(fn, name):
            types[parameter.name], prop = type_and_schema(parameter, fn, name)
            if parameter.name in described:
                prop["description"] = described[parameter.name]
            if parameter.default is parameter.empty:
                required.append(parameter.name)
            else:
                prop |= default_of(parameter.default)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(parameter)
            properties[parameter.name] = prop
        return cls(
            name=name,
            description=description or summary_of(doc) or f"Call the tool {name}.",
            parameters={"type": "object", "properties": properties, "required": required},
            fn=by_keyword(fn, positional) if positional else fn,
            timeout_s=timeout_s,
            types=types,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """A copy of the tool's schema in the OpenAI shape."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Run the tool with the model's arguments. Raises only if the caller is cancelled."""
        try:
            kwargs = self._read(arguments)
        except BadArguments as error:
            return _error(f"{_clipped(str(error))} {self._usage()}")
        # A separate task: a tool that swallows its cancellation cannot block the caller, and a CancelledError raised inside
        # the tool differs from a cancellation of the caller.
        task = asyncio.create_task(self._run(kwargs))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
        if not done:
            return _error(
                f"{self.name} did not finish within {self.timeout_s:g} s. "
                "Try again with less work in one call, or go on without it."
            )
        if task.cancelled():
            return _error(f"{self.name} was cancelled before it finished. Go on without it.")
        return task.result()

    async def _run(self, kwargs: dict[str, Any]) -> ToolResult:
        try:
            if is_async(self.fn):
                value = await self.fn(**kwargs)
            else:
                value = await in_daemon_thread(lambda: self._run_sync(kwargs), name=f"ludic-tool-{self.name}")
            while inspect.isawaitable(value):
                value = await value
            return _as_result(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model reads tool failures
            return self._failed(error)

    def _run_sync(self, kwargs: dict[str, Any]) -> Any:
        """Runs in the thread: returns a ToolResult, or an awaitable for the event loop."""
        try:
            value = self.fn(**kwargs)
            return value if inspect.isawaitable(value) else _as_result(value)
        except BaseException as error:  # noqa: BLE001 - nothing above this frame could report it
            return self._failed(error)

    def _failed(self, error: BaseException) -> ToolResult:
        logger.debug("tool %s failed", self.name, exc_info=error)
        try:
            detail = _clipped(str(error))
        except Exception:  # noqa: BLE001 - an exception whose __str__ raises
            detail = ""
        what = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
        return _error(f"{self.name} failed with {what}\nCorrect the arguments and call it again, or go on without it.")

    def _usage(self) -> str:
        if not self.parameters.get("properties"):
            return f"{self.name} takes no arguments. Call it again with {{}}."
        return (
            f"{self.name} accepts: {in_words(self.parameters)}. Call it again with one JSON object of these arguments."
        )

    def _read(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Decoded and converted arguments; reports all problems at once, so that one more call can fix them."""
        given = decode(arguments)
        problems = [f"unknown argument {path!r}" for path in unknown_keys(self.parameters, given)]
        problems += [f"missing argument {n!r}" for n in self.parameters.get("required", ()) if n not in given]
        kwargs = dict(given)
        for name, kind in self.types.items():
            if name not in given:
                continue  # the callable's own default applies
            try:
                kwargs[name] = convert(given[name], kind)
            except msgspec.ValidationError as error:
                text, _, path = str(error).partition(" - at `$")
                problems.append(f"argument {name + path.rstrip('`')!r}: {text}")
            except Exception as error:  # noqa: BLE001 - a dataclass argument runs its own __post_init__
                problems.append(f"argument {name!r}: {type(error).__name__}: {error}")
        if problems:
            raise BadArguments(f"{'; '.join(problems)}.")
        return kwargs


def as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """A Tool unchanged, any other callable through `Tool.from_callable`."""
    return tool if isinstance(tool, Tool) else Tool.from_callable(tool)


def tool_schema(tool: Tool | Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI-shaped schema of a callable."""
    return as_tool(tool).schema


def _as_result(value: Any) -> ToolResult:
    return value if isinstance(value, ToolResult) else ToolResult(encodable(text_of(value)))


def _error(text: str) -> ToolResult:
    return ToolResult(encodable(f"Error: {text}"), is_error=True)


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL else text[:_MAX_DETAIL] + " …"
