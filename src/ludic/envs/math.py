r"""MATH: competition problems whose answer is a LaTeX expression.

The target is the last `\boxed{…}` of the worked solution. ludic.envs.math_grading compares an
answer with it; the agent's parser reads the answer from the reply.
"""

from ludic.envs.dataset_qa_env import DatasetQAEnv, Sample
from ludic.envs.math_grading import async_is_equivalent, is_equivalent
from ludic.types import StepOutcome
from ludic.types.messages import extract_last_boxed_content

SYSTEM_PROMPT = (
    "You solve competition math problems. Reason step by step, then give the final answer in its simplest exact form "
    r"inside \boxed{}, for example \boxed{\frac{3}{2}}."
)


class MATHEnv(DatasetQAEnv):
    """One problem, one answer; reward 1 for an equivalent expression, else 0.

    Reads records with problem and solution (the original), problem and answer, or question and answer.
    """

    blocking = False  # a worker process does what may take long

    def __init__(self, sample: Sample, *, system_prompt: str | None = SYSTEM_PROMPT) -> None:
        super().__init__(
            sample,
            prompt_key="problem" if "problem" in sample else "question",
            answer_key="solution" if "solution" in sample else "answer",
            system_prompt=system_prompt,
            target_parser=lambda solution: _target(solution, sample),
            verifier=is_equivalent,
        )
        if "unique_id" in sample and not {"id", "uid"} & set(sample):
            self.question_id = str(sample["unique_id"])  # MATH-500's name for it

    async def async_env_step(self, action: str) -> StepOutcome:
        self._require_open()
        return self._graded(action, await async_is_equivalent(action, self.target))


def _target(solution: str, sample: Sample) -> str:
    if boxed := extract_last_boxed_content(solution):
        return boxed
    # MATH-500 and its like carry the bare answer as well. Beside a `question`, `answer` is the worked solution.
    bare = str(sample.get("answer", "")).strip() if "problem" in sample or "solution" in sample else ""
    if bare:
        return bare
    raise ValueError(
        rf"A MATH solution holds its answer in \boxed{{…}}, but this one does not: {solution[-80:]!r}. "
        "Add an `answer` field, or use DatasetQAEnv with a target_parser."
    )
