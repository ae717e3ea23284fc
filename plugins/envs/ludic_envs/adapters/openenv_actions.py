"""Actions of an OpenEnv server: from a model's reply to the JSON that the server's schema asks for."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ludic.types import ConfigError
from ludic.util.files import parse_json

_FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
_PLAIN = {"string", "integer", "number", "boolean"}
_MAX_CHOICES = 64


class UnreadableAction(ValueError):
    """A reply that is no action; the message is for the model."""


class ActionFormat:
    """The format of a server's actions, read from its schema: turns a reply into an action."""

    def __init__(self, schemas: Any, server: str, field: str | None = None) -> None:
        """`schemas` is the server's document /schema. `field`: the field that a reply is the value of."""
        action = schemas.get("action") if isinstance(schemas, Mapping) else None
        if not isinstance(action, Mapping):
            raise ConfigError(f"{server} publishes no schema of actions under /schema; it is no OpenEnv server.")
        defs = action.get("$defs", {})
        fields = {
            name: _plain_schema(schema, defs)
            for name, schema in action.get("properties", {}).items()
            if name != "metadata"
        }
        if field is not None and field not in fields:
            raise ConfigError(f"action_field={field!r}, but the actions of {server} have the fields {sorted(fields)}.")
        self.is_tool_call = {"tool_name", "arguments"} <= set(fields)
        """An action is a call of a tool and nothing else."""
        self.takes_tool_calls = self.is_tool_call or not fields
        """Calls of MCP tools may be sent as actions; then they earn rewards."""
        self._fields, self._required = fields, [name for name in action.get("required", []) if name in fields]
        self._field = field if field is not None else self._only_field()

    def _only_field(self) -> str | None:
        """The field that is the action: the one that is required, or the only one, if its value is plain."""
        names = [] if self.is_tool_call else self._required or list(self._fields)
        return names[0] if len(names) == 1 and self._kind(names[0]) in _PLAIN else None

    def _kind(self, name: str) -> str:
        return str(self._fields[name].get("type", "string" if "enum" in self._fields[name] else "any value"))

    @property
    def is_plain_text(self) -> bool:
        """The reply as it is, without limits."""
        return self._field is not None and self._kind(self._field) == "string" and self.choices is None

    @property
    def choices(self) -> list[str] | None:
        """All actions, where the schema limits them to a few."""
        if self._field is None:
            return None
        schema = self._fields[self._field]
        if "enum" in schema:
            return [str(value) for value in schema["enum"]]
        low, high = schema.get("minimum"), schema.get("maximum")
        if schema.get("type") == "integer" and low is not None and high is not None and high - low < _MAX_CHOICES:
            return [str(number) for number in range(int(low), int(high) + 1)]
        return ["true", "false"] if schema.get("type") == "boolean" else None

    def read(self, said: str) -> dict[str, Any]:
        """The action as JSON, or UnreadableAction."""
        if self._field is not None:
            return {self._field: self._value(self._field, said)}
        found = _FENCED.findall(said)
        try:
            action = parse_json(found[-1] if found else said)
        except ValueError as error:
            raise UnreadableAction(f"The reply is no JSON ({error}).") from error
        if not isinstance(action, dict):
            raise UnreadableAction(f"The reply is a JSON {type(action).__name__}, not an object.")
        missing = [name for name in self._required if name not in action]
        unknown = [name for name in action if name not in self._fields] if self._fields else []
        if missing or unknown:
            raise UnreadableAction(f"The action lacks {missing}, and has the unknown fields {unknown}.")
        return action

    def _value(self, name: str, said: str) -> Any:
        schema, text = self._fields[name], said.strip()
        if "enum" in schema:
            for value in schema["enum"]:
                if str(value).casefold() == text.casefold():
                    return value
            raise UnreadableAction(f"{text[:80]!r} is none of the actions.")
        kind = self._kind(name)
        try:
            match kind:
                case "integer":
                    return int(text)
                case "number":
                    value = float(text)
                    if value - value != 0:
                        raise ValueError("not finite")
                    return value
                case "boolean":
                    return {"true": True, "false": False}[text.casefold()]
                case "string":
                    return said
                case _:
                    return parse_json(said)
        except (ValueError, KeyError) as error:
            raise UnreadableAction(f"{text[:80]!r} is no {kind}.") from error

    def in_words(self) -> str:
        """For the system prompt."""
        if self._field is not None:
            about = self._described(self._field)
            if self.choices is not None and "enum" in self._fields[self._field]:
                return f"Reply with one of: {', '.join(self.choices)}."
            return f"Reply with {about}."
        fields = "; ".join(
            f"{json.dumps(name)}: {self._described(name)}{'' if name in self._required else ' (optional)'}"
            for name in self._fields
        )
        return f"Reply with one JSON object with these fields: {fields or 'any'}."

    def _described(self, name: str) -> str:
        schema = self._fields[name]
        if "enum" in schema:
            return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])
        low, high = schema.get("minimum"), schema.get("maximum")
        limits = (
            ""
            if low is None and high is None
            else f" from {'?' if low is None else low} to {'?' if high is None else high}"
        )
        about = f", {schema['description'].rstrip('.')}" if schema.get("description") else ""
        return f"{schema.get('type', 'any value')}{limits}{about}"


def _plain_schema(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """One field's schema without references, unions with null and constants."""
    schema = dict(schema)
    if "$ref" in schema:
        schema = {**defs.get(schema["$ref"].rpartition("/")[2], {}), **schema}
    members = [member for member in schema.get("anyOf", []) if member.get("type") != "null"]
    if len(members) == 1:
        schema = {**_plain_schema(members[0], defs), **{k: v for k, v in schema.items() if k != "anyOf"}}
    if "const" in schema:
        schema["enum"] = [schema["const"]]
    return schema
