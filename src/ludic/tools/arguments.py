"""Reading what a model sent: JSON decoded, every key known, every value converted to its Python type.

What is wrong is said in words for the model, all of it at once, so that one more call can put it right.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class BadArguments(Exception):
    """What is wrong with the arguments, in words for the model."""


def decode(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    value: Any = arguments
    for _ in range(2):  # some models and parsers encode the object twice
        if isinstance(value, str):
            try:
                # strict=False: models put raw newlines into strings, most of all into code
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
        # A list or object may arrive as JSON text: from a model that quoted it, or from an XML-style call.
        if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
            raise
        try:
            decoded = json.loads(value, strict=False)
        except ValueError:
            decoded = value
        return msgspec.convert(decoded, kind, strict=False)


def unknown_keys(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Paths of keys that the schema does not know. msgspec would drop those inside dataclasses silently."""
    kind = "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "scalar"
    shape = next((s for s in schema.get("anyOf", [schema]) if s.get("type") == kind), None)
    if shape is None:
        return  # a scalar, or something that the conversion is going to refuse
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
