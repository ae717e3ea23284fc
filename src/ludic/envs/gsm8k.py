r"""GSM8K: grade-school word problems whose answer is one whole number.

The worked answer of a sample ends in `#### 1,234`; that number is the target. ludic.envs.math_grading compares an
answer with it; the agent's parser reads the answer (`\boxed{…}`) from the reply.
"""

import re

from ludic.envs.dataset_qa_env import DatasetQAEnv, Sample
from ludic.envs.math_grading import async_is_equivalent, is_equivalent
from ludic.types import StepOutcome

SYSTEM_PROMPT = (
    "You solve math word problems. Reason step by step, then give the final answer as a plain number "
    r"inside \boxed{}, for example \boxed{42}."
)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)


class GSM8KEnv(DatasetQAEnv):
    """One word problem, one answer; reward 1 for the right number, else 0."""

    blocking = False  # a worker process does what may take long

    def __init__(self, sample: Sample, *, system_prompt: str | None = SYSTEM_PROMPT) -> None:
        super().__init__(sample, system_prompt=system_prompt, target_parser=_target, verifier=is_equivalent)

    async def async_env_step(self, action: str) -> StepOutcome:
        self._require_open()
        return self._graded(action, await async_is_equivalent(action, self.target))


def _target(answer: str) -> str:
    _, marker, tail = answer.rpartition("####")
    numbers = _NUMBER.findall(tail) if marker else []
    if not numbers or "." in numbers[-1]:
        raise ValueError(
            f"A GSM8K answer ends in '#### <whole number>', but this one ends in {answer[-80:]!r}. "
            "For other answer formats use DatasetQAEnv with a target_parser."
        )
    return str(int(numbers[-1].replace(",", "")))
