"""The seam between messages and tokens: envs work with messages, training with token ids, and a `Renderer` translates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rolo.message import Message

ToolSpec: TypeAlias = Mapping[str, Any]
"""A tool's schema in OpenAI's shape; `ludic.tools.Tool.from_callable(function).schema` makes it."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    token_ids: Sequence[int]
    conversation: Any = field(default=None, repr=False, compare=False)
    """Whatever the renderer wants to find again in the next turn."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One turn in tokens: those sent, those sampled, and the log-probs of the latter. Training takes exactly these."""

    prompt: RenderedPrompt
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str = "stop"
    """"length" if the reply was cut off."""


class Renderer(Protocol):
    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, after: CompletionOutput | None = None
    ) -> RenderedPrompt:
        """The prompt for the whole conversation so far. `after` is the last turn, whose tokens the new prompt repeats unchanged."""
        ...

    def parse(self, completion: CompletionOutput) -> Message:
        """The sampled reply as an assistant message. An env appends it unchanged to the next state's messages."""
        ...
