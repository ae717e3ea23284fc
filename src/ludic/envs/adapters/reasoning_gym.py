"""reasoning-gym's generators as one env: a task, a seed, a puzzle, and the generator's own score as the reward.

The puzzle of a seed is `reasoning_gym.create_dataset(task, seed=seed, size=1, **config)[0]`. How it is made and scored is
in reasoning_gym_puzzles.py: some of the package's scorers execute what they are given.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from ludic.envs.adapters import reasoning_gym_puzzles as puzzles
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import ConfigError, Info, MissingExtra, Observation, ResetNeeded, StepOutcome, UnknownName

SYSTEM_PROMPT = (
    "You solve reasoning puzzles. Think step by step, then give the final answer, in exactly the form that the question "
    "asks for and nothing else, between <answer> and </answer>."
)
_SEEDS = 2**31
"""numpy, which one generator draws from, takes no larger ones."""

# Where a puzzle has many solutions the package gives no `answer`; these generators note one of them all the same.
_NOTED_ANSWERS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "graph_color": lambda noted: json.dumps(noted["possible_answer"]),
    "propositional_logic": lambda noted: str(noted["example_answer"]),
    "rubiks_cube": lambda noted: str(noted["example_correct_answer"]),
}
WITHOUT_REFERENCE = frozenset({"boxnet", "rush_hour"})
"""Generators that know no solution of their puzzles, only whether one is right."""


class ReasoningGymEnv(SingleAgentEnv):
    """One puzzle of a reasoning-gym generator, one answer; the generator's own score is the reward."""

    def __init__(self, task: str, *, system_prompt: str | None = SYSTEM_PROMPT, **config: Any) -> None:
        """`config` are the generator's own settings, e.g. `ReasoningGymEnv("chain_sum", min_terms=2, max_terms=3)`."""
        super().__init__()
        _check_config(task, config)
        self.task = task
        self.full_reward = 1.0 if puzzles.parts_of(task, config).isdisjoint(WITHOUT_REFERENCE) else None
        self._config = json.dumps(config, sort_keys=True)
        self._needs_child = puzzles.needs_child(task, config)
        self._system_prompt = system_prompt
        self._seed: int | None = None

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    @property
    def _puzzle(self) -> puzzles.Puzzle:
        # Looked up, not kept: the env stays small, and can be pickled.
        if self._seed is None:
            raise ResetNeeded(f"No puzzle of {self.task!r} is open. Call reset first.")
        return puzzles.puzzle(self.task, self._config, self._seed)

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._seed = (random.Random().randrange(_SEEDS) if seed is None else seed) % _SEEDS
        return self._puzzle.entry["question"], {"task": self._puzzle.task, "puzzle_seed": self._seed}

    def env_step(self, action: str) -> StepOutcome:
        return self._scored(action, puzzles.score(self._puzzle, action))

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        return await asyncio.to_thread(self.env_reset, seed=seed) if self._needs_child else self.env_reset(seed=seed)

    async def async_env_step(self, action: str) -> StepOutcome:
        return await asyncio.to_thread(self.env_step, action) if self._needs_child else self.env_step(action)

    def _scored(self, action: str, score: float) -> StepOutcome:
        info: Info = {
            "task": self._puzzle.task,
            "puzzle_seed": self._seed,
            "parsed_answer": action,
            "target_answer": self.reference_action(self.agent_id),
            "correct": score >= 1.0,
        }
        return StepOutcome(f"Score: {score:.2f}.", score, truncated=False, terminated=True, info=info)

    def env_current_obs(self) -> Observation:
        return str(self._puzzle.entry["question"])

    def reference_action(self, agent_id: str) -> str | None:
        puzzle = self._puzzle
        if puzzle.task in _NOTED_ANSWERS:
            return _NOTED_ANSWERS[puzzle.task](puzzle.entry["metadata"])
        answer = puzzle.entry["answer"]
        return None if answer is None else str(answer)


def _check_config(task: str, config: Mapping[str, Any]) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("reasoning-gym", f"The reasoning-gym task {task!r}") from error
    if task not in DATASETS:
        raise UnknownName.among("reasoning-gym task", task, DATASETS)
    if fixed := {"seed", "size"} & config.keys():
        raise ConfigError(
            f"{task!r} was given {sorted(fixed)}; a puzzle's seed comes with reset, and there is one of it."
        )
    if task == "composite" and not config.get("datasets"):
        raise ConfigError(
            "The task 'composite' mixes others; name them: datasets=[{'name': 'chain_sum', 'weight': 1, 'config': {}}, …]."
        )
    try:
        json.dumps(config)
        puzzles.checked_settings(task, {**config, "seed": 0, "size": 1})
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        known = sorted(set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"})
        raise ConfigError(
            f"reasoning-gym cannot make {task!r} with {dict(config)!r:.200}: {error}. Its settings: {', '.join(known)}."
        ) from error
