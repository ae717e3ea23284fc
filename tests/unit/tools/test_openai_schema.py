import pytest

from ludic.tools import Tool, calculator
from ludic.tools.tool import tool_from_schema, tools_from_openai, tools_to_openai
from ludic.types import ConfigError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "at": {"$ref": "#/$defs/Spot"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "wind": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            },
            "required": ["place"],
            "$defs": {"Spot": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    },
}


def weather(**arguments):
    return arguments


def made(schema=WEATHER, handler=weather) -> Tool:
    (tool,) = tools_from_openai([schema], {"weather": handler})
    return tool


async def test_arguments_reach_the_handler_checked_and_converted():
    result = await made().call({"place": "Bonn", "days": "3", "unit": "C", "tags": '["a"]', "wind": 2})
    assert result.content == '{"place": "Bonn", "days": 3, "unit": "C", "tags": ["a"], "wind": 2.0}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing argument 'place'"),
        ({"place": "Bonn", "days": "soon"}, "argument 'days'"),
        ({"place": "Bonn", "unit": "K"}, "argument 'unit'"),
        ({"place": "Bonn", "at": {"long": 1}}, "unknown argument 'at.long'"),
        ({"place": "Bonn", "tags": [1]}, "argument 'tags"),
        ({"plaice": "Bonn"}, "unknown argument 'plaice'"),
    ],
    ids=str,
)
async def test_arguments_that_violate_the_schema_are_reported_to_the_model(arguments, message):
    result = await made().call(arguments)
    assert result.is_error and message in result.content


async def test_to_openai_and_back_is_the_same_tool():
    schemas, handlers = tools_to_openai([calculator, made()])
    again = tools_from_openai(schemas, handlers)
    assert [tool.schema for tool in again] == schemas and [tool.name for tool in again] == ["calculator", "weather"]
    assert (await again[0].call({"expression": "6 * 7"})).content == "42"


async def test_a_type_that_cannot_be_checked_is_passed_as_it_comes():
    either = {
        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "string"}}]
    }
    tool = tool_from_schema("f", "", {"properties": {"x": either, "y": {}, "z": {"enum": [1.5, "a"]}}}, weather)
    assert (await tool.call({"x": ["a"], "y": 1, "z": 1.5})).content == '{"x": ["a"], "y": 1, "z": 1.5}'
    assert (await tool_from_schema("g", "", None, lambda: "done").call({})).content == "done"


@pytest.mark.parametrize(
    ("schemas", "handlers", "message"),
    [
        ([WEATHER], {}, "the handlers \\[\\]"),
        ([WEATHER], {"weather": weather, "wether": weather}, "wether"),
        ([WEATHER, WEATHER], {"weather": weather}, "one schema and one handler"),
        ([{"type": "web_search"}], {}, "is not the schema of a function"),
        ([{"type": "function", "name": "f", "parameters": {"type": "array"}}], {"f": weather}, "must be 'object'"),
        (
            [{"type": "function", "name": "f", "parameters": {"properties": {"x": {"$ref": "#/$defs/X"}}}}],
            {"f": weather},
            "refers to 'X'",
        ),
    ],
    ids=["missing", "unused", "twice", "other", "array", "reference"],
)
def test_schemas_that_cannot_work_are_refused(schemas, handlers, message):
    with pytest.raises(ConfigError, match=message):
        tools_from_openai(schemas, handlers)
