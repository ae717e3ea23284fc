"""A dialogue of two roles: a user with a goal, and an assistant that has to find out and do what the user wants.

The user simulator is an agent like any other: a script, a frozen model, or a policy that is trained. The env carries messages
from one to the other, ends the dialogue and grades what the assistant submits. Subclasses change the instructions and the grading.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from ludic.envs.env import LudicEnv
from ludic.types import ConfigError, Info, Observation, StepOutcome, new_id

USER: Final = "user"
ASSISTANT: Final = "assistant"
UserReward: TypeAlias = Literal["shared", "opposed", "none"]


class UserAndAssistantEnv(LudicEnv[str, Observation, str]):
    """Base of envs in which a user and an assistant take turns: who moves, and what both earn at the end."""

    full_reward: float | None = 1.0

    def __init__(self, *, max_turns: int, user_reward: UserReward) -> None:
        """`max_turns`: messages of the assistant."""
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}; the assistant needs at least one message.")
        if user_reward not in ("shared", "opposed", "none"):
            raise ConfigError(f"user_reward={user_reward!r}; there are shared, opposed and none.")
        self.max_turns, self.user_reward = max_turns, user_reward
        self.full_reward = 1.0 if user_reward == "shared" else None  # otherwise the two roles earn different rewards
        self._to_move: str | None = None
        self._num_turns = 0

    @property
    def agent_ids(self) -> list[str]:
        return [USER, ASSISTANT]

    @property
    def active_agents(self) -> list[str]:
        return [] if self._to_move is None else [self._to_move]

    def _ended(self, score: float, *, truncated: bool, info: Info) -> dict[str, StepOutcome]:
        """The last outcomes of both roles."""
        self._to_move = None
        rewards = {ASSISTANT: score, USER: {"shared": score, "opposed": 1.0 - score, "none": 0.0}[self.user_reward]}
        return {
            role: StepOutcome("The dialogue is over.", rewards[role], truncated, not truncated, info=dict(info))
            for role in self.agent_ids
        }


class DialogueEnv(UserAndAssistantEnv):
    """The user writes first, then they take turns until the assistant submits, the user stops, or `max_turns` are over.

    `sample` has `goal` (shown to the user alone) and `answer` (what the assistant must submit); `rules`, if given, are shown to the
    assistant alone. The assistant submits by writing `submit` and the result; the user leaves by writing `stop`, and earns nothing.
    `user_reward`: the assistant's reward ("shared"), 1 minus it ("opposed", for a simulator that is to be hard to serve), or 0.
    """

    blocking = False

    def __init__(
        self,
        sample: Mapping[str, Any],
        *,
        max_turns: int = 8,
        user_reward: UserReward = "shared",
        submit: str = "SUBMIT:",
        stop: str = "STOP",
    ) -> None:
        """`max_turns`: messages of the assistant."""
        for key in ("goal", "answer"):
            if key not in sample:
                raise ConfigError(
                    f"The sample has no {key!r}; it has {sorted(sample)}. A dialogue needs goal and answer."
                )
        super().__init__(max_turns=max_turns, user_reward=user_reward)
        self.sample = dict(sample)
        self._submit, self._stop = submit, stop

    # --- what a subclass may change ---

    def user_brief(self) -> str:
        """The user's first observation."""
        return (
            f"You are a user who writes to an assistant. What you want: {self.sample['goal']}\n"
            "Write one short message at a time, in your own words. Do not do the assistant's work. Write "
            f"{self._stop} alone if the assistant cannot help you.\n\nWrite your first message."
        )

    def assistant_brief(self, message: str) -> str:
        """The assistant's first observation, which ends with the user's first message."""
        rules = f"{self.sample['rules']}\n" if self.sample.get("rules") else ""
        return (
            f"You are an assistant. Find out what the user wants; ask if something is missing. As soon as you know it, write "
            f"{self._submit} and the result.\n{rules}\nThe user writes: {message}"
        )

    def submission(self, message: str) -> str | None:
        """The result that an assistant's message submits; None if it is a message to the user."""
        _, found, result = message.rpartition(self._submit)
        return result.strip() if found else None

    def grade(self, submission: str) -> float:
        """The score of a submission, from 0 to 1."""
        return float(submission.split() == str(self.sample["answer"]).split())

    # --- the dialogue ---

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Observation, Info]]:
        self._to_move, self._num_turns = USER, 0
        self._episode_id = new_id()
        return {USER: (self.user_brief(), {})}

    def step(self, actions: Mapping[str, str]) -> dict[str, StepOutcome]:
        self._require_running()
        assert self._to_move is not None, "the episode is running"
        message = actions.get(self._to_move)
        if message is None:  # no room for another prompt
            return self._end(0.0, ended_by="silence", truncated=True)
        return self._from_user(message) if self._to_move == USER else self._from_assistant(message)

    def _from_user(self, message: str) -> dict[str, StepOutcome]:
        if message.strip() == self._stop:
            return self._end(0.0, ended_by="user")
        shown = self.assistant_brief(message) if self._num_turns == 0 else message
        return self._hand_over(USER, ASSISTANT, shown)

    def _from_assistant(self, message: str) -> dict[str, StepOutcome]:
        self._num_turns += 1
        submission = self.submission(message)
        if submission is not None:
            return self._end(self.grade(submission), ended_by="submission", submission=submission)
        if self._num_turns == self.max_turns:
            return self._end(0.0, ended_by="turns", truncated=True)
        return self._hand_over(ASSISTANT, USER, message)

    def _hand_over(self, writer: str, reader: str, message: str) -> dict[str, StepOutcome]:
        self._to_move = reader
        info = {"turn": self._num_turns}
        return {writer: StepOutcome("", 0.0, info=dict(info)), reader: StepOutcome(message, 0.0, info=info)}

    def _end(self, score: float, *, truncated: bool = False, **facts: Any) -> dict[str, StepOutcome]:
        info = {"turn": self._num_turns, "score": score, "correct": score >= 1.0, **facts}
        return self._ended(score, truncated=truncated, info=info)

    def reference_action(self, agent_id: str) -> str | None:
        """The user says its goal, the assistant submits the answer."""
        if self._to_move != agent_id:
            return None
        return str(self.sample["goal"]) if agent_id == USER else f"{self._submit} {self.sample['answer']}"
