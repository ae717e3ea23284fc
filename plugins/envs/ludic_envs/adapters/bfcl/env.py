"""BFCL as an environment: one request, the functions of its sample, and the calls that answer it.

The functions are tools of the episode, so the model's own chat template writes them into the prompt and its dialect is read. They
are never run: `CallAgent` hands the calls over as the action, and grading.py compares them with the accepted answers.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.tools.tool import tool_from_schema
from ludic.types import ConfigError, Info, Observation, StepOutcome
from ludic_envs.adapters.base import Call, read_calls
from ludic_envs.adapters.bfcl.grading import Verdict, grade, reference_call, tool_name

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
                as_json_schema(function["parameters"]),
                partial(self._record, tool_name(function["name"])),
            )
            for function in self._functions
        ]

    def _record(self, name: str, /, **arguments: Any) -> str:
        """What an agent that runs its calls (ToolAgent) gets instead of a result."""
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
        calls = [reference_call(accepted, self._functions) for accepted in self._accepted]
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
        {**function, "name": tool_name(function["name"]), "parameters": as_json_schema(function["parameters"])}
        for function in functions
    )
    return "\n".join(json.dumps(function, ensure_ascii=False) for function in described)


def as_json_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """BFCL's description of a parameter as JSON schema: its types have Python's names."""
    schema = dict(parameters)
    if isinstance(schema.get("type"), str):
        schema["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
    if isinstance(schema.get("properties"), Mapping):
        schema["properties"] = {name: as_json_schema(each) for name, each in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            schema[key] = as_json_schema(schema[key])
    return schema
