"""The schema that a model reads: names, types, defaults and descriptions from a signature."""

import functools
import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import msgspec
import pytest

from ludic import registry
from ludic.tools import Tool, as_tool, tool_schema
from ludic.types.errors import ConfigError


class Unit(Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclass
class Point:
    """A place."""

    x: float
    y: float = 0.0


@dataclass
class Route:
    title: str
    stops: list[Point] = field(default_factory=list)
    unit: Unit = Unit.CELSIUS


@dataclass
class Node:
    value: int
    children: list["Node"] = field(default_factory=list)


STRING, INTEGER, NUMBER, NULL = ({"type": t} for t in ("string", "integer", "number", "null"))
POINT = {
    "type": "object",
    "description": "A place.",
    "properties": {"x": NUMBER, "y": {"type": "number", "default": 0.0}},
    "required": ["x"],
}


def schema_of(annotation: Any) -> dict[str, Any]:
    def tool(x): ...

    tool.__annotations__["x"] = annotation
    return tool_schema(tool)["function"]["parameters"]["properties"]["x"]


def test_a_function_becomes_an_openai_schema():
    def search(query: str, limit: int = 5) -> str:
        """Search the library.

        Returns the best matches first.

        Args:
            query: What to look for,
                in plain words.
            limit (int): At most this many.
        """
        return query * limit

    assert tool_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the library.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in plain words."},
                    "limit": {"type": "integer", "description": "At most this many.", "default": 5},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, STRING),
        (int, INTEGER),
        (float, NUMBER),
        (bool, {"type": "boolean"}),
        ("int", INTEGER),
        (Any, STRING),
        (object, STRING),
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (int | None, {"anyOf": [INTEGER, NULL]}),
        (Optional[str], {"anyOf": [STRING, NULL]}),  # noqa: UP045 - the old spelling is what is tested
        ("Optional[Point]", {"anyOf": [POINT, NULL]}),
        (Optional["Point"], {"anyOf": [POINT, NULL]}),
        (list[int], {"type": "array", "items": INTEGER}),
        ("list[Point]", {"type": "array", "items": POINT}),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (dict[str, Point], {"type": "object", "additionalProperties": POINT}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2, "items": False},
        ),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal[True, "auto"], {"enum": [True, "auto"]}),
        (Literal["a", 1], {"enum": [1, "a"]}),
        (Unit, {"type": "string", "enum": ["celsius", "kelvin"]}),
        (Point, POINT),
        (Annotated[int, msgspec.Meta(ge=1)], {"type": "integer", "minimum": 1}),
    ],
)
def test_annotations_map_to_json_types(annotation, expected):
    assert schema_of(annotation) == expected


def test_dataclasses_are_inlined_and_keep_a_field_called_title():
    schema = schema_of(Route)
    assert "$ref" not in json.dumps(schema)
    assert set(schema["properties"]) == {"title", "stops", "unit"}
    assert schema["properties"]["stops"]["items"] == POINT
    assert schema["properties"]["unit"] == {"type": "string", "enum": ["celsius", "kelvin"], "default": "celsius"}


def test_a_recursive_dataclass_is_spelled_out_once():
    assert schema_of(Node)["properties"]["children"] == {"type": "array", "items": {"type": "object"}}


def test_the_schema_accepts_and_refuses_the_right_arguments():
    jsonschema = pytest.importorskip("jsonschema", reason="the dev extra is not installed")

    def plan(route: Route, limit: int | None = None): ...

    validator = jsonschema.Draft202012Validator(tool_schema(plan)["function"]["parameters"])
    assert validator.is_valid({"route": {"title": "home", "stops": [{"x": 1}]}})
    assert not validator.is_valid({"route": {"stops": []}})
    assert not validator.is_valid({"limit": 3})


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        (3, {"default": 3}),
        (None, {"default": None}),
        ((1, 2), {"default": [1, 2]}),
        (Unit.KELVIN, {"default": "kelvin"}),
        (Point(1.0), {"default": {"x": 1.0, "y": 0.0}}),
        (math.inf, {}),
        (object(), {}),
    ],
)
def test_a_default_is_shown_where_json_can_express_it_and_never_required(default, shown):
    def tool(x=default): ...

    parameters = tool_schema(tool)["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"x": {"type": "string", **shown}}, "required": []}


@pytest.mark.parametrize("parameter", ["*args", "**kwargs"])
def test_parameters_without_a_name_are_refused_by_name(parameter):
    namespace: dict[str, Any] = {}
    exec(f"def tool(a, {parameter}): ...", namespace)
    with pytest.raises(ConfigError, match=parameter.replace("*", r"\*")):
        Tool.from_callable(namespace["tool"])


@pytest.mark.parametrize(
    "annotation", [complex, "Nowhere", "not a type", list[int] | tuple[int, int], Literal[Unit.KELVIN]]
)
def test_a_type_json_cannot_carry_is_refused_by_name(annotation):
    with pytest.raises(ConfigError, match=r"'tool'.*x: "):
        schema_of(annotation)


def test_a_docstring_of_sections_only_has_no_summary():
    def tool(x: str):
        """Args:
        x: Anything (even: colons).

        Returns:
            y: Not a parameter.
        """

    def indented(x: str):
        """
        Args:
            x (str, optional): Anything (even: colons).

        Returns:
            x: Not a parameter.
        """

    assert as_tool(tool).description == "Call the tool tool."
    assert as_tool(indented).description == "Call the tool indented."
    assert as_tool(indented).parameters["properties"]["x"]["description"] == "Anything (even: colons)."


class Store:
    """A shelf of things."""

    def get(self, key: str) -> str:
        """Fetch one thing."""
        return key

    def __call__(self, key: str, many: "bool" = False) -> str:
        return key

    @classmethod
    def kinds(cls, of: "Unit") -> str:
        """List kinds."""
        return of.value


@dataclass
class Bare:
    size: int = 1

    def __call__(self) -> int:
        return self.size


def test_methods_and_callable_objects_show_no_self():
    assert list(as_tool(Store().get).parameters["properties"]) == ["key"]
    assert as_tool(Store().get).description == "Fetch one thing."
    assert as_tool(Store.kinds).parameters["properties"]["of"]["enum"] == ["celsius", "kelvin"]
    tool = as_tool(Store())
    assert (tool.name, tool.description) == ("Store", "A shelf of things.")
    assert tool.parameters["properties"]["many"] == {"type": "boolean", "default": False}
    assert as_tool(Bare()).description == "Call the tool Bare."


def test_a_partial_hides_what_it_binds():
    def search(engine: str, query: str, key: str, limit: int = 3) -> str:
        """Search."""
        return query

    tool = as_tool(functools.partial(functools.partial(search, "web"), key="secret"))
    assert (tool.name, tool.description) == ("search", "Search.")
    assert tool.parameters["required"] == ["query"]
    assert list(tool.parameters["properties"]) == ["query", "limit"]
    assert "secret" not in json.dumps(tool.schema)


def test_decorated_functions_show_the_signature_inside():
    @functools.lru_cache
    def tool(x: "Point"):
        """Cached."""

    assert as_tool(tool).parameters["properties"]["x"] == POINT
    assert as_tool(tool).description == "Cached."


def test_annotations_resolve_local_and_later_assigned_names():
    class Local(Enum):
        A = "a"

    @as_tool
    def tool(x: Local, y: "Local") -> "Nowhere":  # type: ignore[name-defined]  # noqa: F821
        return tool, Local  # a closure over itself, empty while the decorator runs

    assert tool.parameters["properties"] == {n: {"type": "string", "enum": ["a"]} for n in ("x", "y")}


@pytest.mark.parametrize("name", registry.tools.list())
def test_every_registered_tool_has_a_described_schema(name):
    function = tool_schema(registry.tools.make(name, **registry.tools.spec(name).example))["function"]
    assert function["description"] != f"Call the tool {name}."
    assert all(prop.get("description") for prop in function["parameters"]["properties"].values())
