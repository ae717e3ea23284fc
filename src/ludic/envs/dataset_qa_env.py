"""One question, one answer: the env for datasets whose answers can be checked."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import Info, Observation, ResetNeeded, StepOutcome

Sample: TypeAlias = Mapping[str, Any]
ParserFn: TypeAlias = Callable[[str], str]
VerifierFn: TypeAlias = Callable[[str, str], bool]
"""(parsed answer, target) -> whether the answer is right."""
PromptBuilder: TypeAlias = Callable[[Sample], str]


def _same_text(answer: str, target: str) -> bool:
    return answer.strip().casefold() == target.strip().casefold()


class DatasetQAEnv(SingleAgentEnv):
    """Shows a sample's question, grades the one answer, ends. The agent's parser reads the answer from the model's text."""

    def __init__(
        self,
        sample: Sample,
        *,
        prompt_key: str = "question",
        answer_key: str = "answer",
        system_prompt: str | None = None,
        prompt_builder: PromptBuilder | None = None,
        target_parser: ParserFn = str.strip,
        verifier: VerifierFn = _same_text,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        super().__init__()
        for key in (answer_key,) if prompt_builder else (prompt_key, answer_key):
            if key not in sample:
                raise KeyError(f"The sample has no {key!r}; it has {sorted(sample)}. Set prompt_key or answer_key.")
        self.sample = sample
        self.question = prompt_builder(sample) if prompt_builder else str(sample[prompt_key])
        self.target = target_parser(str(sample[answer_key]))
        self.question_id = str(sample.get("id", sample.get("uid", "0")))
        self.full_reward = correct_reward
        self._system_prompt = system_prompt
        self._verifier = verifier
        self._rewards = {True: correct_reward, False: incorrect_reward}
        self._answered = True

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._answered = False
        return self.question, {"question_id": self.question_id}

    def env_step(self, action: str) -> StepOutcome:
        self._require_open()
        return self._graded(action, self._verifier(action, self.target))

    def _require_open(self) -> None:
        if self._answered:
            raise ResetNeeded(f"Question {self.question_id} is not open; call reset to ask it (again).")

    def _graded(self, action: str, correct: bool) -> StepOutcome:
        self._answered = True
        info = {
            "question_id": self.question_id,
            "raw_action": action,
            "parsed_answer": action.strip(),
            "target_answer": self.target,
            "correct": correct,
        }
        obs = "Correct." if correct else "Incorrect."
        return StepOutcome(obs, self._rewards[correct], terminated=True, info=info)

    def env_current_obs(self) -> Observation:
        return self.question

    def reference_action(self, agent_id: str) -> str | None:
        return self.target
