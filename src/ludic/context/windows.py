"""Contexts that shorten the prompt: a sliding window of turns, transcripts without old thinking, and summaries."""

import re

from ludic.context.base import ContextStrategy, FullDialog
from ludic.types import ConfigError, Info, Message, Observation
from ludic.types.messages import joined


class SlidingWindow(ContextStrategy):
    """Shows the system prompt and the last `max_turns` turns; older ones are dropped from the prompt.

    A turn is an observation with every reply and tool result up to the next observation. `slide_by` turns are
    dropped at a time: between two slides the prompt only grows, so its tokens (and the server's cache) are reused.
    """

    rewrites_history = True

    def __init__(
        self,
        system_prompt: str | None = None,
        *,
        max_turns: int = 8,
        slide_by: int = 1,
        keep_first_turn: bool = False,
    ) -> None:
        if max_turns < 1 or not 1 <= slide_by <= max_turns:
            raise ConfigError(
                f"SlidingWindow(max_turns={max_turns}, slide_by={slide_by}): it must show at least one turn, "
                "and slide by at least 1 and at most max_turns."
            )
        self.max_turns = max_turns
        self.slide_by = slide_by
        self.keep_first_turn = keep_first_turn
        super().__init__(system_prompt)

    def on_before_act(self) -> list[Message]:
        starts = self._turn_starts()
        excess = len(starts) - self.max_turns
        if excess <= 0:
            return list(self._messages)
        num_dropped = -(-excess // self.slide_by) * self.slide_by
        first = starts[0]
        pinned = self._messages[: starts[1] if self.keep_first_turn else first]
        # With the first turn pinned, drop one more old turn.
        window = min(num_dropped + (1 if self.keep_first_turn else 0), len(starts) - 1)
        return [*pinned, *self._messages[starts[window] :]]

    def _turn_starts(self) -> list[int]:
        starts, before = [], "system"
        for position, message in enumerate(self._messages):
            # A user message after a tool result is a note within the turn, not a new observation.
            if message["role"] == "user" and before in ("system", "assistant"):
                starts.append(position)
            before = message["role"]
        return starts


# Matches only a leading, closed think block with an answer after it.
_THINK_THEN_ANSWER = re.compile(r"(\s*<think>)(?:(?!</?think>).)*(</think>)(\s*\S.*)\Z", re.IGNORECASE | re.DOTALL)


class TruncatedThinkingContext(ContextStrategy):
    """In the prompt, the inside of a finished think block is replaced by a placeholder."""

    rewrites_history = True

    def __init__(self, system_prompt: str | None = None, placeholder: str = "[TRUNCATED]") -> None:
        self.placeholder = placeholder
        self._shown: list[Message] = []
        super().__init__(system_prompt)

    def on_before_act(self) -> list[Message]:
        return list(self._shown)

    def reset(self, *, system_prompt: str | None = None) -> None:
        self._shown = []
        super().reset(system_prompt=system_prompt)

    def _append(self, message: Message) -> None:
        super()._append(message)
        # Each message is rewritten once, on arrival; `add_note` may have replaced the last one, hence the deletion.
        del self._shown[len(self._messages) - 1 :]
        self._shown.append(self._truncated(message))

    def _truncated(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        match = _THINK_THEN_ANSWER.match(message["content"])
        if match is None:
            return message
        return {**message, "content": f"{match[1]}{self.placeholder}{match[2]}{match[3]}"}


class SummarisedDialog(FullDialog):
    """The whole transcript, until FoldingAgent folds it into a summary.

    The context decides when to fold (`is_full`) and folds (`fold`); the agent writes the summary. Folding rewrites history, so it
    starts a new token segment; between two folds the prompt only grows.
    """

    rewrites_history = True

    def __init__(self, system_prompt: str | None = None, *, max_turns: int | None = 16) -> None:
        """With `max_turns=None` only the agent's token limit (`FoldingAgent.fold_at_tokens`) triggers a fold."""
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"SummarisedDialog(max_turns={max_turns}): it must hold at least one turn, or be None.")
        self.max_turns = max_turns
        self._num_turns = 0
        self._newest: Observation = ""
        super().__init__(system_prompt)

    @property
    def is_full(self) -> bool:
        """There are more than `max_turns` turns since the last fold."""
        return self.max_turns is not None and self._num_turns > self.max_turns

    @property
    def has_replies(self) -> bool:
        """There is a reply since the last fold. Otherwise folding again would not shorten the prompt."""
        return any(message["role"] == "assistant" for message in self._messages)

    def reset(self, *, system_prompt: str | None = None) -> None:
        self._num_turns = 0
        super().reset(system_prompt=system_prompt)

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        super().on_env_reset(obs, info)
        self._observed(obs)

    def on_after_step(self, obs: Observation, info: Info) -> None:
        super().on_after_step(obs, info)
        # Parse feedback comes without the env's state, which is unchanged: keep the last observation too.
        self._observed(joined([self._newest, obs]) if info.get("parse_error") else obs)

    def _observed(self, obs: Observation) -> None:
        self._newest = obs
        self._num_turns += 1

    def fold(self, summary: str) -> None:
        """Keep the system prompt and the newest observation, with the summary before it."""
        self._messages = [message for message in self._messages[:1] if message["role"] == "system"]
        self._append({"role": "user", "content": joined([summary, self._newest])})
        self._num_turns = 1
