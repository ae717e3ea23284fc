"""A dialogue that can be folded into a summary, so that an episode may be longer than the context window."""

from ludic.context.base import ContextStrategy
from ludic.types import ConfigError, Info, Message, Observation


class SummarisedDialog(ContextStrategy):
    """The whole transcript, until FoldingAgent folds it into a summary.

    The context says when to fold (`is_full`) and folds (`fold`); the agent writes the summary. Folding rewrites history, so it
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
        self._observed(f"{self._newest}\n\n{obs}" if info.get("parse_error") else obs)

    def _observed(self, obs: Observation) -> None:
        self._newest = obs
        self._num_turns += 1

    def on_before_act(self) -> list[Message]:
        return list(self._messages)

    def fold(self, summary: str) -> None:
        """Keep the system prompt and the newest observation, with the summary before it."""
        self._messages = [message for message in self._messages[:1] if message["role"] == "system"]
        self._append({"role": "user", "content": f"{summary}\n\n{self._newest}"})
        self._num_turns = 1
