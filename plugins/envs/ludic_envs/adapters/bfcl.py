"""BFCL as an environment: one request, the functions of its sample, and the calls that answer it.

The functions are tools of the episode, so the model's own chat template writes them into the prompt and its dialect is read. They
are never run: `CallAgent` hands the calls over as the action, and they are compared with the accepted answers.

An accepted answer is `{function: {parameter: [value, value, …]}}`: every listed value is right, and "" among them means that the
parameter may be left out. Texts are compared without case, blanks and the signs `,./-_*^`; everything else must be equal and of
the declared type. The rules follow the benchmark's description; docs/envs/bfcl.md names the differences.

As a program, it writes BFCL's own samples, from the package `bfcl-eval` or its wheel:

    python -m ludic_envs.adapters.bfcl multiple irrelevance > bfcl.jsonl
"""

import argparse
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.tools.tool import tool_from_schema
from ludic.types import ConfigError, Info, MissingPackage, Observation, StepOutcome, UnknownName
from ludic.util.files import parse_json
from ludic_envs.adapters.base import Call, read_calls, write_samples

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
    """The grade of some calls, with the reason if they are wrong."""

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
    """True if every row can get a separate column."""
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
    declared, required = _parameters_of(described[function])
    for key, value in arguments.items():
        if key not in declared or (key not in values and key not in required):
            return f"{key} is not expected"
        if problem := _problem_with_value(value, values.get(key), declared[key]):
            return f"{key} {problem}"
    needed = {key for key, options in values.items() if _LEFT_OUT not in options and key in declared} | required
    return next((f"{key} is missing" for key in sorted(needed) if key not in arguments), "")


def _parameters_of(function: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
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
    """True if a value is the accepted one. In an accepted object each key has a list of accepted values."""
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


def _reference_call(accepted: Accepted, functions: Sequence[Mapping[str, Any]]) -> Call:
    """A call that the grading accepts: the first value of each parameter."""
    ((function, values),) = accepted.items()
    declared, required = _parameters_of(next(each for each in functions if each["name"] == function))
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


_CATEGORY = re.compile(r"(.+?)_\d")
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_IN_PROMPT = (
    'You can call functions. To call one, write <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call>; write several such '
    "blocks to call several. If no function fits the request, or a value that a function needs is missing, answer without a "
    "call. Functions:\n{functions}"
)


class BFCLEnv(SingleAgentEnv):
    """One request, one reply; reward 1 if its function calls are right, else 0."""

    blocking = False
    full_reward = 1.0

    def __init__(
        self,
        sample: Mapping[str, Any],
        *,
        system_prompt: str | None = None,
        functions_in_prompt: bool = False,
    ) -> None:
        """`sample`: a line of BFCL with its `ground_truth`; the id names the category. `functions_in_prompt` writes the functions
        into the system prompt, for a model whose chat template has no place for tools (with `tools_in_prompt=False`)."""
        super().__init__()
        for key in ("id", "question", "function"):
            if key not in sample:
                raise ConfigError(
                    f"The sample has no {key!r}; it has {sorted(sample)}. A BFCL sample has id, question, function."
                )
        self.sample_id = str(sample["id"])
        found = _CATEGORY.match(self.sample_id)
        self.category = found[1] if found else self.sample_id
        self._functions: list[dict[str, Any]] = list(sample["function"])
        self._accepted: list[dict[str, Any]] = list(sample.get("ground_truth") or ())
        if not self._accepted and "relevance" not in self.category:
            raise ConfigError(
                f"Sample {self.sample_id!r} has no ground_truth; only samples of (ir)relevance have none."
            )
        system, self._request = _read_messages(sample["question"])
        described = [_IN_PROMPT.format(functions=_listed(self._functions))] if functions_in_prompt else []
        self._system_prompt = "\n\n".join(filter(None, [system_prompt, system, *described])) or None
        self._recorded: list[Call] = []

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._recorded = []
        return self._request, {"sample_id": self.sample_id, "category": self.category}

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return [
            tool_from_schema(
                tool_name(function["name"]),
                function.get("description", ""),
                _as_json_schema(function["parameters"]),
                partial(self._record, tool_name(function["name"])),
            )
            for function in self._functions
        ]

    def _record(self, name: str, /, **arguments: Any) -> str:
        """Record a call; an agent that runs its calls (ToolAgent) gets this text instead of a result."""
        self._recorded.append((name, arguments))
        return "The call is recorded. There is no result; end your turn when you have made all calls."

    def env_step(self, action: str) -> StepOutcome:
        calls = [*self._recorded, *(read_calls(action) or ())]
        verdict = self._verdict(calls)
        info: Info = {
            "sample_id": self.sample_id,
            "category": self.category,
            "correct": verdict.is_right,
            "reason": verdict.reason,
            "num_calls": len(calls),
        }
        return StepOutcome(
            "Right." if verdict.is_right else "Wrong.", float(verdict.is_right), terminated=True, info=info
        )

    def _verdict(self, calls: Sequence[Call]) -> Verdict:
        if "irrelevance" in self.category:
            return Verdict(not calls, "calls a function although none fits" if calls else "")
        if self._accepted:
            return grade(calls, self._accepted, self._functions)
        offered = {tool_name(function["name"]) for function in self._functions}
        is_right = any(tool_name(name) in offered for name, _ in calls)
        return Verdict(is_right, "" if is_right else "calls no function although one fits")

    def env_current_obs(self) -> Observation:
        return self._request

    def reference_action(self, agent_id: str) -> str | None:
        if "irrelevance" in self.category:
            return "No function fits."
        calls = [_reference_call(accepted, self._functions) for accepted in self._accepted]
        calls = calls or [(tool_name(self._functions[0]["name"]), {})]
        return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


def _read_messages(question: Sequence[Sequence[Mapping[str, str]]]) -> tuple[str, Observation]:
    """(the system message, the request). An earlier exchange is part of the request, with the speakers' names."""
    if len(question) != 1:
        raise ConfigError(f"The sample has {len(question)} turns; categories with several turns are not supported.")
    system = "\n\n".join(message["content"] for message in question[0] if message["role"] == "system")
    said = [message for message in question[0] if message["role"] != "system"]
    if all(message["role"] == "user" for message in said):
        return system, "\n\n".join(message["content"] for message in said)
    return system, "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in said)


def _listed(functions: Sequence[Mapping[str, Any]]) -> str:
    described = (
        {**function, "name": tool_name(function["name"]), "parameters": _as_json_schema(function["parameters"])}
        for function in functions
    )
    return "\n".join(json.dumps(function, ensure_ascii=False) for function in described)


def _as_json_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """BFCL's description of a parameter as JSON schema: its types have Python's names."""
    schema = dict(parameters)
    if isinstance(schema.get("type"), str):
        schema["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
    if isinstance(schema.get("properties"), Mapping):
        schema["properties"] = {name: _as_json_schema(each) for name, each in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            schema[key] = _as_json_schema(schema[key])
    return schema


CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
"""The supported ones: one turn, Python types."""
_FOLDER = "bfcl_eval/data"


def read_bfcl(categories: Sequence[str], wheel: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """The samples of some categories, each with its `ground_truth` where the benchmark has one."""
    for category in categories:
        if category not in CATEGORIES:
            raise UnknownName.among("supported BFCL category", category, CATEGORIES)
    read = _reader(wheel)
    for category in categories:
        file = f"BFCL_v4_{category}.json"
        rows = _rows(read(file))
        answers = [] if "relevance" in category else _rows(read(f"possible_answer/{file}"))
        accepted = {answer["id"]: answer["ground_truth"] for answer in answers}
        for row in rows:
            yield {**row, "ground_truth": accepted[row["id"]]} if accepted else row


def _rows(text: str) -> list[dict[str, Any]]:
    return [parse_json(line) for line in text.splitlines() if line.strip()]


def _reader(wheel: str | Path | None) -> Callable[[str], str]:
    if wheel is not None:
        archive = zipfile.ZipFile(wheel)
        return lambda name: archive.read(f"{_FOLDER}/{name}").decode("utf-8")
    found = find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise MissingPackage(
            "bfcl-eval", "The samples of BFCL", "pip install --no-deps bfcl-eval (the data needs nothing else)"
        )
    folder = Path(next(iter(found.submodule_search_locations))) / "data"
    return lambda name: (folder / name).read_text(encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Write samples as JSONL to standard output."""
    parser = argparse.ArgumentParser(prog="python -m ludic_envs.adapters.bfcl", description=main.__doc__)
    parser.add_argument("categories", nargs="+", metavar="CATEGORY", help=f"{', '.join(CATEGORIES)}, or all")
    parser.add_argument("--wheel", help="file of bfcl-eval, if the package is not installed")
    args = parser.parse_args(argv)
    chosen = CATEGORIES if args.categories == ["all"] else args.categories
    write_samples(lambda: read_bfcl(chosen, args.wheel))


if __name__ == "__main__":
    main()
