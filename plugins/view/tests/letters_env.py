"""An env of two turns whose rewards differ between siblings from the first update on: a random model's letters are counted."""

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class LettersEnv(SingleAgentEnv):
    """Reward: the share of small letters in the reply; the second turn ends it."""

    def __init__(self, word: str = "abc") -> None:
        super().__init__()
        self._word = word
        self._turn = 0

    def env_reset(self, *, seed: int | None = None):
        self._turn = 0
        return f"Spell {self._word}.", {}

    def env_step(self, action: str) -> StepOutcome:
        self._turn += 1
        reward = sum(c.islower() for c in action) / max(len(action), 1)
        return StepOutcome("Again.", reward, terminated=self._turn == 2, info={"letters": reward})
