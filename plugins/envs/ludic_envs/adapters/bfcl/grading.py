"""Compares function calls with the accepted answers of a BFCL sample.

An accepted answer is `{function: {parameter: [value, value, …]}}`: every listed value is right, and "" among them means that the
parameter may be left out. Texts are compared without case, blanks and the signs `,./-_*^`; everything else must be equal and of
the declared type. The rules follow the benchmark's description; docs/envs/bfcl.md names the differences.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ludic_envs.adapters.base import Call

Accepted: TypeAlias = Mapping[str, Mapping[str, Sequence[Any]]]
"""One accepted call: a mapping with one function."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "any": (str,), "integer": (int,), "float": (float, int), "number": (float, int), "boolean": (bool,),
    "array": (list,), "tuple": (list,), "dict": (dict,), "object": (dict,),
}  # fmt: skip
_IGNORED = re.compile(r"[ ,./\-_*^]")
_LEFT_OUT = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the calls are right, and if not, why."""

    is_right: bool
    reason: str = ""


def tool_name(function: str) -> str:
    """The name under which a model knows the function: chat templates and servers accept no dots."""
    return function.replace(".", "_")


def grade(calls: Sequence[Call], accepted: Sequence[Accepted], functions: Sequence[Mapping[str, Any]]) -> Verdict:
    """Right if each call matches another accepted one, in any order, and none is left over."""
    if len(calls) != len(accepted):
        return Verdict(False, f"{len(calls)} calls instead of {len(accepted)}")
    described = {str(function["name"]): function for function in functions}
    problems = [[problem_with(call, gold, described) for gold in accepted] for call in calls]
    fits = [[not problem for problem in row] for row in problems]
    if _can_be_paired(fits, set()):
        return Verdict(True)
    for row, fit in zip(problems, fits, strict=True):
        if not any(fit):
            # With several accepted calls, the most telling problem is about one of the same function.
            return Verdict(False, next((problem for problem in row if not problem.startswith("calls ")), row[0]))
    return Verdict(False, "two calls answer the same part of the question")


def _can_be_paired(fits: Sequence[Sequence[bool]], used: set[int]) -> bool:
    """Whether every row can get a separate column."""
    if not fits:
        return True
    columns = (column for column, fit in enumerate(fits[0]) if fit and column not in used)
    return any(_can_be_paired(fits[1:], used | {column}) for column in columns)


def problem_with(call: Call, accepted: Accepted, described: Mapping[str, Mapping[str, Any]]) -> str:
    """Why the call differs from an accepted one; empty if it does not."""
    ((function, values),) = accepted.items()
    name, arguments = call
    if name not in (function, tool_name(function)):
        return f"calls {name} instead of {tool_name(function)}"
    declared, required = parameters_of(described[function])
    for key, value in arguments.items():
        if key not in declared or (key not in values and key not in required):
            return f"{key} is not expected"
        if problem := _problem_with_value(value, values.get(key), declared[key]):
            return f"{key} {problem}"
    needed = {key for key, options in values.items() if _LEFT_OUT not in options and key in declared} | required
    return next((f"{key} is missing" for key in sorted(needed) if key not in arguments), "")


def parameters_of(function: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
    """(declared parameters, names of the required ones)."""
    return function["parameters"].get("properties", {}), set(function["parameters"].get("required", ()))


def _problem_with_value(value: Any, options: Sequence[Any] | None, declared: Mapping[str, Any]) -> str:
    """`options` is None for a required parameter without accepted values: any value of its type is right then."""
    if not _has_type(value, declared) and not _is_variable(value, options or ()):
        return f"is {json.dumps(value)}, not of type {declared.get('type')}"
    if options is None or any(accepts(option, value) for option in options) or (not options and value == []):
        return ""
    return f"is {json.dumps(value)}, which is not accepted"


def _has_type(value: Any, declared: Mapping[str, Any]) -> bool:
    kinds = _TYPES.get(str(declared.get("type")), (object,))
    if isinstance(value, bool) and bool not in kinds and object not in kinds:
        return False  # Python counts True as an integer
    if not isinstance(value, kinds):
        return False
    items = declared.get("items")
    return (
        not isinstance(value, list) or not isinstance(items, Mapping) or all(_has_type(each, items) for each in value)
    )


def _is_variable(value: Any, options: Sequence[Any]) -> bool:
    """The question may name a variable instead of a value: then the answers have another type than the parameter."""
    kinds = [type(option) for option in options if option != _LEFT_OUT]
    return bool(kinds) and type(value) is kinds[0]


def accepts(option: Any, value: Any) -> bool:
    """Whether a value is the accepted one. In an accepted object each key has a list of accepted values."""
    if isinstance(option, Mapping) and isinstance(value, Mapping):
        return option == value or _accepts_object(option, value)
    if isinstance(option, list) and isinstance(value, list):
        return len(option) == len(value) and all(map(accepts, option, value))
    if isinstance(option, str) and isinstance(value, str):
        return _folded(option) == _folded(value)
    return isinstance(option, bool) == isinstance(value, bool) and bool(option == value)


def _accepts_object(option: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    options = {key: each if isinstance(each, list) else [each] for key, each in option.items()}
    if any(key not in options or not any(accepts(each, item) for each in options[key]) for key, item in value.items()):
        return False
    return all(key in value or _LEFT_OUT in each for key, each in options.items())


def _folded(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def reference_call(accepted: Accepted, functions: Sequence[Mapping[str, Any]]) -> Call:
    """A call that the grading accepts: the first value of each parameter."""
    ((function, values),) = accepted.items()
    declared, required = parameters_of(next(each for each in functions if each["name"] == function))
    chosen = {key: value for key, value in _first_values(values).items() if key in declared}
    return tool_name(function), dict.fromkeys(sorted(required - chosen.keys()), "") | chosen


def _first_values(values: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {}
    for key, options in values.items():
        listed = options if isinstance(options, list) else [options]
        given = [option for option in listed if option != _LEFT_OUT]
        if given:
            chosen[key] = _spelled_out(given[0])
        elif not listed:
            chosen[key] = []  # no accepted value: the empty list is right
    return chosen


def _spelled_out(option: Any) -> Any:
    """An accepted value as a value: objects have a list of values under each key."""
    if isinstance(option, Mapping):
        return _first_values(option)
    return [_spelled_out(each) for each in option] if isinstance(option, list) else option
