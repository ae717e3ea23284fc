"""The RL types: states, actions, environments, trajectories and rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rolo.message import Message, ToolCall
from rolo.rendering import CompletionOutput, ToolSpec

Example: TypeAlias = Mapping[str, Any]
"""One line of a dataset."""


@dataclass(frozen=True, slots=True)
class State:
    messages: tuple[Message, ...]
    """The whole conversation: the previous state's messages, the action's message, and the new ones. (A changed history starts a
    new prompt.)"""
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    message: Message
    """The policy's reply."""
    is_cut_off: bool = False
    """The reply hit the token limit."""

    @property
    def text(self) -> str:
        return self.message.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls


class Env(Protocol):
    def start(self) -> State: ...

    def step(self, action: Action) -> State | None:
        """The next state; None at the end of the episode. An env runs one episode."""
        ...


class EnvBuilder(Protocol):
    def build(self, example: Example) -> Env: ...


@dataclass(frozen=True, slots=True)
class Step:
    state: State
    action: Action
    completion: CompletionOutput
    """The same turn in tokens."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    steps: tuple[Step, ...]
    is_finished: bool
    """The env ended the episode; False if a limit of turns or tokens did."""

    @property
    def last_action(self) -> Action:
        return self.steps[-1].action


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    """Reward for the comparison within a group."""
    is_correct: bool
    """For accuracy and pass@k."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers, with the same names for every trajectory; their means are logged."""
