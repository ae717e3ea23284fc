"""A tool: a Python callable that a model can call by name.

The signature is the contract. It gives the JSON schema that the model reads, and it decides what arrives:
arguments are checked and converted before the callable sees them, and whatever goes wrong on the way becomes
a text that tells the model what to do. Which tools an agent has, and where results go, is up to ludic.agents.

Only the wait is bounded by `timeout_s`: Python cannot kill a thread, so a sync tool that never returns keeps
its daemon thread until the process ends. Code that is not trusted belongs in a sandbox, not in a tool.
"""

import asyncio
import copy
import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ludic.tools.arguments import BadArguments, convert, decode, in_words, unknown_keys
from ludic.tools.running import in_daemon_thread, text_of
from ludic.tools.signature import (
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
_MAX_DETAIL = 1000  # characters about what went wrong that are worth a place in the prompt
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
        """The tool in the OpenAI shape; a copy, which may be changed freely."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Run the tool on what the model sent. Raises only when the caller itself is cancelled."""
        try:
            kwargs = self._read(arguments)
        except BadArguments as error:
            return _error(f"{_clipped(str(error))} {self._usage()}")
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
        """Decoded and converted arguments; every problem at once, so that one more call can put all right."""
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
    """A Tool as it is; anything else through `Tool.from_callable`."""
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
