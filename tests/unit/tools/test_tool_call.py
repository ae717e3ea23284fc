"""A call: arguments checked, work kept off the event loop, every failure a text for the model."""

import asyncio
import contextvars
import functools
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

import pytest

from ludic.tools import Tool, ToolResult, as_tool


class Color(str, Enum):  # noqa: UP042 - its str() is "Color.RED", unlike StrEnum's
    RED = "red"


@dataclass
class Point:
    x: int
    y: int = 0

    def __post_init__(self) -> None:
        if self.x > 99:
            raise KeyError("x is off the map")


@dataclass
class Line:
    points: list[Point] = field(default_factory=list)


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


async def test_arguments_come_as_json_or_as_a_mapping():
    tool = as_tool(add)
    assert await tool.call('{"a": 2, "b": 3}') == ToolResult("5", is_error=False)
    assert await tool.call({"a": 2}) == ToolResult("3")


@pytest.mark.parametrize(
    ("annotation", "given", "arrives"),
    [
        (int, "5", 5),
        (int, 5.0, 5),
        (float, 5, 5.0),
        (bool, "true", True),
        (int | None, "null", None),
        (str, "null", "null"),
        (str | int, "5", "5"),
        (tuple[int, str], [1, "a"], (1, "a")),
        (Color, "red", Color.RED),
        (Point, {"x": "1"}, Point(1)),
        (list[Point], [{"x": 1, "y": 2}], [Point(1, 2)]),
        (list[int], "[1, 2]", [1, 2]),
        (Point, '{"x": 3}', Point(3)),
        (str, "[1, 2]", "[1, 2]"),
        (dict, {"free": {"form": 1}}, {"free": {"form": 1}}),
        (Any, [1, None], [1, None]),
    ],
)
async def test_values_are_converted_to_the_annotated_type(annotation, given, arrives):
    def tool(x): ...

    got: list[Any] = []
    tool.__annotations__["x"] = annotation
    made = Tool.from_callable(tool)
    made = Tool(made.name, made.description, made.parameters, lambda x: got.append(x), types=made.types)
    assert await made.call({"x": given}) == ToolResult("")
    assert got == [arrives]
    assert type(got[0]) is type(arrives)


async def test_omitted_arguments_leave_the_default_object_alone():
    default = object()

    def tool(x: int = default) -> bool:  # type: ignore[assignment]
        return x is default

    assert (await as_tool(tool).call({})).content == "true"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{a: 1}", ["not valid JSON", "a (integer)"]),
        ("[" * 100_000, ["not valid JSON"]),
        ("1" * 5000, ["not valid JSON"]),
        ("[1]", ["one JSON object", "list"]),
        ('"hello"', ["not valid JSON"]),
        ('{"a": 1, "c": 2}', ["unknown argument 'c'", "a (integer), b (integer, optional)"]),
        ("{}", ["missing argument 'a'", "a (integer)"]),
        ('{"a": "many"}', ["argument 'a'", "Expected `int`"]),
        ('{"a": null}', ["argument 'a'"]),
        ('{"b": [], "c": 1}', ["missing argument 'a'", "unknown argument 'c'", "argument 'b'"]),
    ],
)
async def test_bad_arguments_are_named_together_with_what_is_accepted(arguments, says):
    result = await as_tool(add).call(arguments)
    assert result.is_error
    assert result.content.startswith("Error: ")
    for part in says:
        assert part in result.content


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"line": {"points": [{"x": 1, "z": 2}]}}, "unknown argument 'line.points[0].z'"),
        ({"line": {"points": [{"x": "q"}]}}, "argument 'line.points[0].x': Expected `int`"),
        ({"line": {"points": [{"y": 1}]}}, "missing required field `x`"),
        ({"line": {"points": [{"x": 100}]}}, "x is off the map"),
        ({"line": {}, "mode": "slow"}, 'mode (one of "fast", "safe", optional)'),
        ({"line": 3}, "line (object with points (array of object with x (integer), y (integer, optional), optional))"),
    ],
)
async def test_mistakes_inside_nested_arguments_are_located(given, says):
    def draw(line: Line, mode: Literal["fast", "safe"] = "fast"): ...

    result = await as_tool(draw).call(given)
    assert result.is_error
    assert says in result.content


async def test_a_hand_written_schema_checks_names_and_passes_values_as_they_come():
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool = Tool("echo", "Echo.", parameters, lambda **kwargs: kwargs)
    assert (await tool.call({"x": "5"})).content == '{"x": "5"}'
    assert "unknown argument 'y'" in (await tool.call({"x": 1, "y": 2})).content
    free = Tool("echo", "Echo.", {**parameters, "additionalProperties": True}, lambda **kwargs: kwargs)
    assert (await free.call({"x": 1, "y": 2})).content == '{"x": 1, "y": 2}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as is", "as is"),
        ("", ""),
        (None, ""),
        (Color.RED, "red"),
        (True, "true"),
        (3, "3"),
        (0.5, "0.5"),
        ([1, (2, None)], "[1, [2, null]]"),
        ({"naïve": Point(1)}, '{"naïve": {"x": 1, "y": 0}}'),
        (Line([Point(1)]), '{"points": [{"x": 1, "y": 0}]}'),
        ({"when": Decimal("1.5")}, '{"when": "1.5"}'),
        (Decimal("1.5"), "1.5"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (Point, str(Point)),
        ("odd \ud800", "odd ?"),
    ],
)
async def test_results_become_text(value, text):
    def tool():
        return value

    async def async_tool():
        return value

    assert await as_tool(tool).call({}) == ToolResult(text)
    assert await as_tool(async_tool).call({}) == ToolResult(text)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("empty list"), "boom failed with ValueError: empty list"),
        (StopIteration(), "StopIteration"),  # a future refuses to carry this one
        (TimeoutError("upstream"), "TimeoutError: upstream"),
        (SystemExit(3), "SystemExit: 3"),
        (Unprintable(), "Unprintable"),
        (ValueError("long" * 10_000), "long …"),
    ],
)
@pytest.mark.parametrize("color", ["sync", "async"])
async def test_an_exception_becomes_a_text_for_the_model(error, says, color):
    def boom():
        raise error

    async def async_boom():
        raise error

    tool = Tool.from_callable(boom if color == "sync" else async_boom, name="boom")
    result = await tool.call({})
    assert result.is_error
    if not (color == "async" and isinstance(error, StopIteration)):  # Python turns that one into RuntimeError
        assert says in result.content
    assert len(result.content) < 2000


@pytest.mark.parametrize("color", ["sync", "async"])
async def test_a_cancellation_that_the_tool_raises_itself_does_not_cancel_the_caller(color):
    def tool():
        raise asyncio.CancelledError

    async def async_tool():
        raise asyncio.CancelledError

    assert (await as_tool(tool if color == "sync" else async_tool).call({})).is_error


class AsyncObject:
    async def __call__(self, x: int) -> int:
        await asyncio.sleep(0)
        return x + 1


class SyncObject:
    def __call__(self, x: int) -> int:
        return x + 1

    def method(self, x: int) -> int:
        return x + 1

    async def async_method(self, x: int) -> int:
        return x + 1


async def plus(y: int, x: int) -> int:
    return x + y


def sync_plus(x: int, /, y: int = 1) -> int:
    return x + y


def hidden_async(x: int):
    return AsyncObject()(x)


@pytest.mark.parametrize(
    "fn",
    [
        AsyncObject(),
        SyncObject(),
        SyncObject().method,
        SyncObject().async_method,
        functools.partial(plus, 1),
        functools.partial(sync_plus, y=1),
        functools.partial(AsyncObject()),
        sync_plus,
        hidden_async,
    ],
)
async def test_every_kind_of_callable_can_be_called(fn):
    assert await as_tool(fn).call({"x": "1"}) == ToolResult("2")


async def test_sync_tools_run_off_the_event_loop_in_a_daemon_thread_with_the_callers_context():
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    def tool() -> dict[str, Any]:
        thread = threading.current_thread()
        seen = {"main": thread is threading.main_thread(), "daemon": thread.daemon, "user": user.get()}
        user.set("changed")
        return seen

    user.set("ada")
    assert json.loads((await as_tool(tool).call({})).content) == {"main": False, "daemon": True, "user": "ada"}
    assert user.get() == "ada"


@pytest.mark.parametrize("color", ["sync", "async", "sync that returns a coroutine"])
async def test_a_tool_that_takes_too_long_is_given_up(color):
    release = threading.Event()

    async def forever():
        await asyncio.sleep(60)

    fns = {"sync": lambda: release.wait(60), "async": forever, "sync that returns a coroutine": lambda: forever()}
    tool = Tool.from_callable(fns[color], name="slow", timeout_s=0.05)
    start = time.perf_counter()
    result = await tool.call({})
    release.set()
    assert time.perf_counter() - start < 30
    assert result.is_error
    assert "slow did not finish within 0.05 s" in result.content


async def test_a_coroutine_that_comes_too_late_is_closed():
    release = threading.Event()

    async def late(): ...

    def tool():
        release.wait(60)
        return late()

    assert (await Tool.from_callable(tool, timeout_s=0.01).call({})).is_error
    release.set()
    await asyncio.sleep(0.05)  # an unclosed coroutine would warn here, which pytest makes an error


async def test_an_async_tool_may_clean_up_when_its_time_is_over():
    steps: list[str] = []

    async def tool():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            steps.append("closed")

    assert (await Tool.from_callable(tool, timeout_s=0.01).call({})).is_error
    assert steps == ["closed"]


async def test_an_async_tool_that_swallows_its_cancellation_cannot_hold_the_caller(monkeypatch):
    monkeypatch.setattr("ludic.tools.tool._GRACE_S", 0.02)
    stop = asyncio.Event()

    async def stubborn():
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue

    result = await asyncio.wait_for(Tool.from_callable(stubborn, timeout_s=0.01).call({}), timeout=60)
    stop.set()
    assert result.is_error


@pytest.mark.parametrize("color", ["sync", "async"])
async def test_cancelling_the_caller_propagates_and_reaches_an_async_tool(color):
    release, reached = threading.Event(), []

    async def sleep():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            reached.append(True)
            raise

    tool = Tool.from_callable(sleep if color == "async" else lambda: release.wait(60), name="sleep", timeout_s=None)
    call = asyncio.create_task(tool.call({}))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    release.set()
    assert reached == ([True] if color == "async" else [])


def test_a_hanging_tool_does_not_keep_the_interpreter_from_exiting():
    program = """
import asyncio, threading
from ludic.tools import Tool

def hang():
    threading.Event().wait()

result = asyncio.run(Tool.from_callable(hang, timeout_s=0.05).call({}))
assert result.is_error, result
print(result.content)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "did not finish within 0.05 s" in done.stdout


async def test_double_encoded_arguments_are_decoded_twice():
    assert (await as_tool(add).call(json.dumps(json.dumps({"a": 2})))).content == "3"


@pytest.mark.parametrize("arguments", ["", "  ", "{}", "null", '"{}"', {}])
async def test_no_arguments_may_be_spelled_in_many_ways(arguments):
    def ping() -> str:
        return "pong"

    assert (await as_tool(ping).call(arguments)).content == "pong"
