"""A dialogue that can be folded: what lies behind becomes a summary, so that an episode may be longer than any prompt."""

from ludic.context.base import ContextStrategy
from ludic.types import ConfigError, Info, Message, Observation


class SummarisedDialog(ContextStrategy):
    """Everything is shown, until an agent that writes summaries (FoldingAgent) folds it into one.

    It says when it is time (`is_full`) and does the folding (`fold`); the words are the agent's. Folding rewrites
    history, so a new token segment starts with it; between two of them the prompt only grows.
    """

    rewrites_history = True

    def __init__(self, system_prompt: str | None = None, *, max_turns: int | None = 16) -> None:
        """`max_turns=None` is never full by itself; the agent then counts tokens (`FoldingAgent.fold_at_tokens`)."""
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"SummarisedDialog(max_turns={max_turns}): it must hold at least one turn, or be None.")
        self.max_turns = max_turns
        self._num_turns = 0
        self._newest: Observation = ""
        super().__init__(system_prompt)

    @property
    def is_full(self) -> bool:
        """More turns than `max_turns` have been shown since the last fold."""
        return self.max_turns is not None and self._num_turns > self.max_turns

    @property
    def has_replies(self) -> bool:
        """Something was said since the last fold. Without that, folding again would leave the prompt as long as it is."""
        return any(message["role"] == "assistant" for message in self._messages)

    def reset(self, *, system_prompt: str | None = None) -> None:
        self._num_turns = 0
        super().reset(system_prompt=system_prompt)

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        super().on_env_reset(obs, info)
        self._observed(obs)

    def on_after_step(self, obs: Observation, info: Info) -> None:
        super().on_after_step(obs, info)
        # What is wrong with a reply that could not be read comes alone; the env is still where it was.
        self._observed(f"{self._newest}\n\n{obs}" if info.get("parse_error") else obs)

    def _observed(self, obs: Observation) -> None:
        self._newest = obs
        self._num_turns += 1

    def on_before_act(self) -> list[Message]:
        return list(self._messages)

    def fold(self, summary: str) -> None:
        """Forget all but the system prompt and the newest observation; the summary stands before it."""
        self._messages = [message for message in self._messages[:1] if message["role"] == "system"]
        self._append({"role": "user", "content": f"{summary}\n\n{self._newest}"})
        self._num_turns = 1
