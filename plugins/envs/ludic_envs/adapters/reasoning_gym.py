"""reasoning-gym's generators as one env: a task, a seed, a puzzle, and the generator's own score as the reward.

The puzzle of a seed is `reasoning_gym.create_dataset(task, seed=seed, size=1, **config)[0]`. Scorers get untrusted model output.
Four call `eval` on it and five sympy's `parse_expr`, which is `eval` too: they would run the model's code, or compute for hours.
They get only literals and arithmetic, and the five run in a child process with a time limit. The child, whose hash seed is fixed,
also makes the puzzles of generators that iterate over sets.
"""

import asyncio
import copy
import importlib
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.tools.calculator import is_harmless, is_python
from ludic.types import ConfigError, Info, MissingExtra, Observation, ResetNeeded, StepOutcome, UnknownName
from ludic.util import worker
from ludic_envs.adapters.base import GlobalRandom

SYSTEM_PROMPT = (
    "You solve reasoning puzzles. Think step by step, then give the final answer, in exactly the form that the question "
    "asks for and nothing else, between <answer> and </answer>."
)
_SEEDS = 2**31
"""Numpy, which one generator uses, takes no larger seeds."""

# Where a puzzle has many solutions the package gives no `answer`, but these generators store one.
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
        self.full_reward = 1.0 if parts_of(task, config).isdisjoint(WITHOUT_REFERENCE) else None
        self._config = json.dumps(config, sort_keys=True)
        self._needs_child = needs_child(task, config)
        self._system_prompt = system_prompt
        self._seed: int | None = None

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    @property
    def _puzzle(self) -> "_Puzzle":
        # From a cache: the env stays small, and can be pickled.
        if self._seed is None:
            raise ResetNeeded(f"No puzzle of {self.task!r} is open. Call reset first.")
        return make_puzzle(self.task, self._config, self._seed)

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._seed = (random.Random().randrange(_SEEDS) if seed is None else seed) % _SEEDS
        return self._puzzle.entry["question"], {"task": self._puzzle.task, "puzzle_seed": self._seed}

    def env_step(self, action: str) -> StepOutcome:
        reward = score(self._puzzle, action)
        info: Info = {
            "task": self._puzzle.task,
            "puzzle_seed": self._seed,
            "parsed_answer": action,
            "target_answer": self.reference_action(self.agent_id),
            "correct": reward >= 1.0,
        }
        return StepOutcome(f"Score: {reward:.2f}.", reward, terminated=True, info=info)

    async def async_env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        return await asyncio.to_thread(self.env_reset, seed=seed) if self._needs_child else self.env_reset(seed=seed)

    async def async_env_step(self, action: str) -> StepOutcome:
        return await asyncio.to_thread(self.env_step, action) if self._needs_child else self.env_step(action)

    def env_current_obs(self) -> Observation:
        return str(self._puzzle.entry["question"])

    def reference_action(self, agent_id: str) -> str | None:
        puzzle = self._puzzle
        if puzzle.task in _NOTED_ANSWERS:
            return _NOTED_ANSWERS[puzzle.task](puzzle.entry["metadata"])
        answer = puzzle.entry["answer"]
        return None if answer is None else str(answer)


def _generators() -> dict[str, Any]:
    """The package's generators by name. The package itself is imported first: while one thread imports it, another would find
    its `factory` loaded and still empty."""
    importlib.import_module("reasoning_gym")
    found: dict[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    return found


def _check_config(task: str, config: Mapping[str, Any]) -> None:
    try:
        generators = _generators()
    except ImportError as error:
        raise MissingExtra("reasoning-gym", f"The reasoning-gym task {task!r}") from error
    if task not in generators:
        raise UnknownName.among("reasoning-gym task", task, generators)
    if fixed := {"seed", "size"} & config.keys():
        raise ConfigError(f"{task!r} was given {sorted(fixed)}; reset sets the seed, and an episode has one puzzle.")
    if task == "composite" and not config.get("datasets"):
        raise ConfigError(
            "The task 'composite' mixes others; name them: datasets=[{'name': 'chain_sum', 'weight': 1, 'config': {}}, …]."
        )
    try:
        json.dumps(config)
        _checked_settings(task, {**config, "seed": 0, "size": 1})
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        known = sorted(set(generators[task][1].__dataclass_fields__) - {"seed", "size"})
        raise ConfigError(
            f"reasoning-gym cannot make {task!r} with {dict(config)!r:.200}: {error}. Its settings: {', '.join(known)}."
        ) from error


# --- wrong answers that scorers of reasoning-gym reward; a policy would find them ---

Entry = Mapping[str, Any]

_NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity)[ij]?\b", re.IGNORECASE)
"""Scorers that look for a difference find none with these."""


def _is_loophole(task: str, answer: str, entry: Entry) -> bool:
    """True if the answer must score 0, although the scorer may reward it."""
    reference = str(entry["answer"])
    if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(reference):
        return True
    return task in _WRONG and _WRONG[task](answer, entry)


def _uses_other_numbers(answer: str, entry: Entry) -> bool:
    """The scorer wants four numbers that make 24, but not the four that were given."""
    return sorted(re.findall(r"\d+", answer)) != sorted(map(str, entry["metadata"]["numbers"]))


def _is_another_probability(answer: str, entry: Entry) -> bool:
    """The scorer rewards the share of the shorter text that agrees: `0` is the beginning of every answer."""
    try:
        given, right = (Fraction(text.replace(",", "").strip()) for text in (answer, str(entry["answer"])))
    except (ValueError, ZeroDivisionError):
        return True
    return abs(given - right) > min(Fraction(1, 10_000), right / 100)


_WRONG = {"puzzle24": _uses_other_numbers, "coin_flip": _is_another_probability}

# --- puzzles and scores ---

EVALUATE_PYTHON = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
READ_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
ITERATE_OVER_SETS = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
COUNT_WITHOUT_LIMIT = frozenset({"rubiks_cube"})
"""R999999999 is a billion turns to its scorer."""
TRUST_ANY_TEXT = frozenset({"game_of_life_halting"})
"""Its scorer reads every text as True, and so as right; the answer itself is compared instead."""
_MODULE = "ludic_envs.adapters.reasoning_gym"
_MAKE_S, _SCORE_S = 60.0, 5.0
_MAX_CHARS = 20_000
_HUGE = re.compile(r"\d[eE]\+?\d{4}")
"""Fraction("1e999999999") has a billion digits, and some scorers would write them all."""

Source = tuple[str, str, int]
"""Task, settings as JSON, seed."""


@dataclass(frozen=True, slots=True)
class _Puzzle:
    """One entry of a generator."""

    task: str
    """Its generator; in a `composite`, that of the part."""
    source: Source
    entry: Mapping[str, Any]
    is_childs: bool
    """The child process makes it and scores answers to it."""


def parts_of(task: str, settings: Mapping[str, Any]) -> set[str]:
    """The generators that puzzles may come from; `composite` mixes others."""
    return {str(part["name"]) for part in settings["datasets"]} if task == "composite" else {task}


def needs_child(task: str, settings: Mapping[str, Any]) -> bool:
    return not parts_of(task, settings).isdisjoint(READ_EXPRESSIONS | ITERATE_OVER_SETS | COUNT_WITHOUT_LIMIT)


def _checked_settings(task: str, settings: Mapping[str, Any]) -> Any:
    """The settings as the generator's own type, which raises TypeError at an unknown name and AssertionError at a bad value."""
    from reasoning_gym.composite import DatasetSpec

    parts = {"datasets": [DatasetSpec(**part) for part in settings["datasets"]]} if task == "composite" else {}
    checked = _generators()[task][1](**{**settings, **parts})
    if hasattr(checked, "validate"):  # two of the package's types have none
        checked.validate()
    return checked


@lru_cache(maxsize=512)  # the episodes of a group share their puzzle
def make_puzzle(task: str, config: str, seed: int) -> _Puzzle:
    source = (task, config, seed)
    is_childs = needs_child(task, json.loads(config))
    entry = _ask_child({"make": source}, _MAKE_S) if is_childs else _made(*source)[1]
    if entry is None:
        raise RuntimeError(
            f"reasoning-gym's {task!r} made no puzzle of seed {seed}: it raised, or took more than {_MAKE_S:.0f} seconds."
        )
    return _Puzzle(entry["metadata"]["source_dataset"] if task == "composite" else task, source, entry, is_childs)


@lru_cache(maxsize=64)  # a generator may hold megabytes of words or fonts
def _made(task: str, config: str, seed: int) -> tuple[Any, dict[str, Any]]:
    # list_functions draws from Python's global generator, and pool_matrix seeds numpy's.
    with GlobalRandom(seed).installed():
        dataset = _generators()[task][0](
            config=_checked_settings(task, {**json.loads(config), "seed": seed, "size": 1})
        )
        return dataset, dataset[0]


def score(puzzle: _Puzzle, answer: str) -> float:
    """The generator's score; 0 for an answer that it must not get, cannot read, or takes too long over."""
    if len(answer) > _MAX_CHARS or _HUGE.search(answer) or _is_loophole(puzzle.task, answer, puzzle.entry):
        return 0.0
    if puzzle.task in TRUST_ANY_TEXT:
        return float(answer.strip().casefold() == str(puzzle.entry["answer"]).casefold())
    may_be_run = answer == puzzle.entry["answer"] or is_harmless(answer)
    would_be_run = puzzle.task in READ_EXPRESSIONS or (puzzle.task in EVALUATE_PYTHON and is_python(answer))
    if would_be_run and not may_be_run:
        return 0.0
    if puzzle.is_childs:
        return float(_ask_child({"source": puzzle.source, "answer": answer}, _SCORE_S) or 0.0)
    return _scored(puzzle.source, answer)


def _scored(source: Source, answer: str) -> float:
    dataset, entry = _made(*source)
    try:
        return float(dataset.score_answer(answer, copy.deepcopy(entry)))  # some scorers write into the entry
    except Exception:  # noqa: BLE001 - third-party code may raise anything at odd input
        return 0.0


# --- the child process ---


def _ask_child(question: worker.Question, timeout_s: float) -> Any | None:
    child = worker.worker_of_this_process(
        _MODULE, lambda: worker.Worker(_MODULE, extra="reasoning-gym", needed_for="reasoning-gym")
    )
    return child.ask(question, timeout_s=timeout_s)


def _load() -> Callable[[worker.Question], Any]:
    import reasoning_gym  # noqa: F401 - so that a missing package is reported before the first question

    def answer(question: worker.Question) -> Any:
        if "make" in question:
            return json.loads(json.dumps(_made(*question["make"])[1], default=str))
        return _scored(question["source"], question["answer"])

    return answer


if __name__ == "__main__":
    worker.serve(_load, when_raised=None)
