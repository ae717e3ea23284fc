"""The RL layer: states, actions, environments, and what became of an episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ludic.minimal.message import Message, ToolCall
from ludic.minimal.rendering import ToolSpec
from ludic.types import TokenTrace

Example: TypeAlias = Mapping[str, Any]
"""One line of a dataset."""


@dataclass(frozen=True, slots=True)
class State:
    messages: tuple[Message, ...]
    """The whole conversation: the last state's, the action's message, and what is new. (Another history costs a new prompt.)"""
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Action:
    message: Message
    """The policy's reply."""
    is_cut_off: bool = False
    """The model was not done when its tokens ran out."""

    @property
    def text(self) -> str:
        return str(self.message["content"])

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.message.get("tool_calls") or []


class Env(Protocol):
    def start(self) -> State: ...

    def step(self, action: Action) -> State | None:
        """What is shown next; None when the episode is over. An env plays one episode."""
        ...


class EnvBuilder(Protocol):
    def build(self, example: Example) -> Env: ...


@dataclass(frozen=True, slots=True)
class Step:
    state: State
    action: Action
    completion: TokenTrace
    """The same turn in tokens, for training: exactly those that were sent and sampled, with the log-probs of the latter."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    steps: tuple[Step, ...]
    is_finished: bool
    """The env ended it, and not the limit of turns or tokens."""

    @property
    def last_action(self) -> Action:
        return self.steps[-1].action


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    """What is compared within a group."""
    is_correct: bool
    """What accuracy and pass@k count."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers worth seeing, the same names for every trajectory; their means are logged."""
