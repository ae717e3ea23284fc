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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ludic.tools.schema import (
    BadArguments,
    described_parameters,
    doc_of,
    in_words,
    inlined,
    is_async,
    name_of,
    read_arguments,
    summary_of,
    type_of,
)
from ludic.types.errors import ConfigError, encodable

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what chat templates and the OpenAI API accept
_MAX_DETAIL = 1000  # characters of an error message in the prompt
_GRACE_S = 1.0  # time for the clean-up of a cancelled async tool


async def _in_daemon_thread(work: Callable[[], Any], *, name: str) -> Any:
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


@dataclasses.dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer to the model. A tool may return one to report an error without raising."""

    content: str
    is_error: bool = False
    raised: type[BaseException] | None = None
    """Type of what the tool raised; TimeoutError where it took too long."""


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
        parameters, types, fn = described_parameters(fn, name, doc)
        return cls(name, description or summary_of(doc) or f"Call the tool {name}.", parameters, fn, timeout_s, types)

    def __call__(self, **arguments: Any) -> Any:
        """The callable's result, without the checks of `call`; an env may offer Tools among its callables."""
        return self.fn(**arguments)

    @property
    def schema(self) -> dict[str, Any]:
        """A copy of the tool's schema in the OpenAI shape."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Run the tool with the model's arguments. Raises only if the caller is cancelled."""
        try:
            kwargs = read_arguments(arguments, self.parameters, self.types)
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
                "Try again with less work in one call, or go on without it.",
                TimeoutError,
            )
        if task.cancelled():
            return _error(f"{self.name} was cancelled before it finished. Go on without it.")
        return task.result()

    async def _run(self, kwargs: dict[str, Any]) -> ToolResult:
        try:
            if is_async(self.fn):
                value = await self.fn(**kwargs)
            else:
                value = await _in_daemon_thread(lambda: self._run_sync(kwargs), name=f"ludic-tool-{self.name}")
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
        return _error(
            f"{self.name} failed with {what}\nCorrect the arguments and call it again, or go on without it.",
            type(error),
        )

    def _usage(self) -> str:
        if not self.parameters.get("properties"):
            return f"{self.name} takes no arguments. Call it again with {{}}."
        accepted = in_words(self.parameters)
        return f"{self.name} accepts: {accepted}. Call it again with one JSON object of these arguments."


def as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """A Tool unchanged, any other callable through `Tool.from_callable`, with its attribute `timeout_s` if it has one."""
    if isinstance(tool, Tool):
        return tool
    return Tool.from_callable(tool, timeout_s=getattr(tool, "timeout_s", 30.0))


def tool_schema(tool: Tool | Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI-shaped schema of a callable."""
    return as_tool(tool).schema


# --- tools from and to OpenAI-style schemas ---


def tools_from_openai(
    schemas: Sequence[Mapping[str, Any]], handlers: Mapping[str, Callable[..., Any]], *, timeout_s: float | None = 30.0
) -> list[Tool]:
    """One tool per schema, `{"type": "function", "function": {…}}` or without the inner level.

    Arguments are checked and converted by Python types that follow from the schema's JSON types.
    """
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


def tools_to_openai(
    tools: Iterable[Tool | Callable[..., Any]],
) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """(schemas, handlers): what `tools_from_openai` takes."""
    made = [as_tool(tool) for tool in tools]
    return [tool.schema for tool in made], {tool.name: tool.fn for tool in made}


def tool_from_schema(
    name: str,
    description: str,
    parameters: Mapping[str, Any] | None,
    handler: Callable[..., Any],
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
        types={key: kind for key, sub in schema["properties"].items() if (kind := type_of(sub)) is not Any},
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


# --- results as text ---


def _as_result(value: Any) -> ToolResult:
    return value if isinstance(value, ToolResult) else ToolResult(encodable(text_of(value)))


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


def _error(text: str, raised: type[BaseException] | None = None) -> ToolResult:
    return ToolResult(encodable(f"Error: {text}"), is_error=True, raised=raised)


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL else text[:_MAX_DETAIL] + " …"
