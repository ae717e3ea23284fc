"""reasoning-gym's puzzles and scorers, made reproducible and safe.

Scorers get untrusted model output. Four call `eval` on it and five sympy's `parse_expr`, which is `eval` too: they
would run the model's code, or compute for hours. They get only literals and arithmetic, and the five run in a
child with a time limit. The child, whose hash seed is fixed, also makes the puzzles of generators that iterate over sets.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from ludic.envs import worker
from ludic.sandbox.arithmetic import is_harmless, is_python

# --- Wrong answers that scorers of reasoning-gym reward; each was found by trying, and a policy would find them too ---

Entry = Mapping[str, Any]

_NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity)[ij]?\b", re.IGNORECASE)
"""No comparison with it is ever false: scorers that look for a difference find none."""


def is_loophole(task: str, answer: str, entry: Entry) -> bool:
    """Must this answer earn nothing, whatever the scorer says?"""
    reference = str(entry["answer"])
    if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(reference):
        return True
    return task in _WRONG and _WRONG[task](answer, entry)


def _uses_other_numbers(answer: str, entry: Entry) -> bool:
    """The scorer wants four numbers that make 24, but not the four that were given."""
    return sorted(re.findall(r"\d+", answer)) != sorted(map(str, entry["metadata"]["numbers"]))


def _is_another_probability(answer: str, entry: Entry) -> bool:
    """The scorer pays the share of the shorter text that agrees: `0` is all of itself, and the beginning of every answer."""
    try:
        given, right = (Fraction(text.replace(",", "").strip()) for text in (answer, str(entry["answer"])))
    except (ValueError, ZeroDivisionError):
        return True
    return abs(given - right) > min(Fraction(1, 10_000), right / 100)


_WRONG: dict[str, Callable[[str, Entry], bool]] = {
    "puzzle24": _uses_other_numbers,
    "coin_flip": _is_another_probability,
}


EVALUATE_PYTHON = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
READ_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
ITERATE_OVER_SETS = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
COUNT_FOR_EVER = frozenset({"rubiks_cube"})
"""R999999999 is a billion turns to its scorer."""
TRUST_ANY_TEXT = frozenset({"game_of_life_halting"})
"""Its scorer takes every text for True, and so for right: here the answer itself is compared."""
_MODULE = "ludic.envs.adapters.reasoning_gym_puzzles"
_MAKE_S, _SCORE_S = 60.0, 5.0
_MAX_CHARS = 20_000
_HUGE = re.compile(r"\d[eE]\+?\d{4}")
"""Fraction("1e999999999") is a number of a billion digits, and some scorers would write them all."""

Source = tuple[str, str, int]
"""Task, settings as JSON, seed."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One entry of a generator."""

    task: str
    """The generator that made it; of a `composite`, the part."""
    source: Source
    entry: Mapping[str, Any]
    is_childs: bool
    """The child made it, and judges answers to it."""


def parts_of(task: str, settings: Mapping[str, Any]) -> set[str]:
    """The generators that puzzles may come from: `composite` mixes others."""
    return {str(part["name"]) for part in settings["datasets"]} if task == "composite" else {task}


def needs_child(task: str, settings: Mapping[str, Any]) -> bool:
    return not parts_of(task, settings).isdisjoint(READ_EXPRESSIONS | ITERATE_OVER_SETS | COUNT_FOR_EVER)


def checked_settings(task: str, settings: Mapping[str, Any]) -> Any:
    """As the generator's own type; it raises TypeError at an unknown name and AssertionError at a bad value."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    parts = {"datasets": [DatasetSpec(**part) for part in settings["datasets"]]} if task == "composite" else {}
    checked = DATASETS[task][1](**{**settings, **parts})
    if hasattr(checked, "validate"):  # two of the package's types have none
        checked.validate()
    return checked


@lru_cache(maxsize=512)  # the episodes of a group share their puzzle
def puzzle(task: str, config: str, seed: int) -> Puzzle:
    source = (task, config, seed)
    is_childs = needs_child(task, json.loads(config))
    entry = _ask_child({"make": source}, _MAKE_S) if is_childs else _made(*source)[1]
    if entry is None:
        raise RuntimeError(
            f"reasoning-gym's {task!r} made no puzzle of seed {seed}: it raised, or took more than {_MAKE_S:.0f} seconds."
        )
    return Puzzle(entry["metadata"]["source_dataset"] if task == "composite" else task, source, entry, is_childs)


@lru_cache(maxsize=64)  # a generator may hold megabytes of words or fonts
def _made(task: str, config: str, seed: int) -> tuple[Any, dict[str, Any]]:
    from reasoning_gym.factory import DATASETS

    with _global_seed(seed):
        dataset = DATASETS[task][0](config=checked_settings(task, {**json.loads(config), "seed": seed, "size": 1}))
        return dataset, dataset[0]


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """list_functions uses Python's global generator and pool_matrix seeds numpy's; seed both here and restore them."""
    python, arrays = random.getstate(), np.random.get_state()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def score(puzzle: Puzzle, answer: str) -> float:
    """What the generator's scorer gives; 0 for what it must not be given, cannot read, or takes too long over."""
    if len(answer) > _MAX_CHARS or _HUGE.search(answer):
        return 0.0
    if is_loophole(puzzle.task, answer, puzzle.entry):
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
    except Exception:  # noqa: BLE001 - other people's code raises whatever it likes at odd input
        return 0.0


# --- the child ----------------------------------------------------------------------------------------------


def _ask_child(question: worker.Question, timeout_s: float) -> Any | None:
    child = worker.worker_of_this_process(
        _MODULE, lambda: worker.Worker(_MODULE, extra="reasoning-gym", needed_for="reasoning-gym")
    )
    return child.ask(question, timeout_s=timeout_s)


def _load() -> Callable[[worker.Question], Any]:
    import reasoning_gym  # noqa: F401 - here, so that what is missing is told before the first question

    def answer(question: worker.Question) -> Any:
        if "make" in question:
            return json.loads(json.dumps(_made(*question["make"])[1], default=str))
        return _scored(question["source"], question["answer"])

    return answer


if __name__ == "__main__":
    worker.serve(_load, when_raised=None)
