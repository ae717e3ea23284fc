"""An env in which credit for whole episodes fails: first luck, then skill.

The first turn is a lottery with a high stake: every text is a ticket, and which tickets win is drawn again for every seed
and not shown. So siblings with other tickets are far apart and nothing can be learned of it. Then come easy questions,
worth 1 each.
A rule that judges every turn by the whole episode blames right answers for lost tickets; one that judges a turn by what
followed it, or by others who stood before the same question, does not see the lottery.
"""

from collections.abc import Callable

from ludic.envs import SingleAgentEnv
from ludic.types import Info, StepOutcome, derive_seed


def ignore(is_right: bool) -> None:
    """No score is kept."""


class LuckThenSkill(SingleAgentEnv):
    """Asked ?, write anything: your ticket. Then, asked x, answer with ASCII; asked y, with anything else."""

    blocking = False

    def __init__(
        self, *, num_questions: int = 3, stake: float = 50.0, on_answer: Callable[[bool], None] = ignore
    ) -> None:
        super().__init__()
        self._num_questions, self._stake, self._on_answer = num_questions, stake, on_answer

    @property
    def suggested_sysprompt(self) -> None:
        return None

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        self._seed, self._turn = seed or 0, 0
        self._wants_ascii = [derive_seed(self._seed, turn) % 2 == 0 for turn in range(self._num_questions)]
        return "?", {}

    def env_step(self, action: str) -> StepOutcome:
        reward = self._draw(action) if self._turn == 0 else self._answer(action)
        self._turn += 1
        if self._turn > self._num_questions:
            return StepOutcome("", reward, terminated=True)
        return StepOutcome("x" if self._wants_ascii[self._turn - 1] else "y", reward)

    def _draw(self, ticket: str) -> float:
        wins = derive_seed(self._seed, self._num_questions, *ticket.encode()) % 2 == 0
        return self._stake if wins else -self._stake

    def _answer(self, action: str) -> float:
        is_ascii = bool(action) and action.isascii()
        is_right = is_ascii == self._wants_ascii[self._turn - 1]
        self._on_answer(is_right)
        return float(is_right)
