"""math-verify in a separate process (ludic.util.worker).

math-verify limits its time with signal.alarm, which only works on a main thread, and some sympy computations cannot be stopped from
inside their process. Answers that need no algebra are decided in ludic.envs.math_grading.
"""

import os
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from ludic.util import worker

_MODULE = "ludic.envs.math_worker"
_QUICK_S = 0.3
"""CPU time; nearly every question needs far less."""
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
r"""A variable; \pi and \frac contain none."""
_EQUATION_TO_ZERO = re.compile(r"[^=]*[-+][^=]*=\s*0\s*")
"""5x - 7y + 4 = 0 is about x and y; the answer is not 0."""


class MathWorker(worker.Workers):
    """Worker processes that run math-verify."""

    def __init__(self, num: int = max(2, min(4, (os.cpu_count() or 2) // 2))) -> None:
        one = partial(worker.Worker, _MODULE, extra="math", needed_for="Grading answers that are not plain numbers")
        super().__init__(one, num=num, quick_s=_QUICK_S)

    def check(self, answer: str, gold: str, *, timeout_s: float) -> bool:
        """True if the LaTeX `answer` equals `gold`; False for an answer that takes too long or ends the child."""
        question = {"answer": answer, "gold": gold}
        return self.ask(question, answer=answer, reference=gold, timeout_s=timeout_s) is True


def worker_of_this_process() -> MathWorker:
    return worker.worker_of_this_process(_MODULE, MathWorker)


def _load() -> Callable[[worker.Question], bool]:
    from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify

    # units=False: math-verify strips any trailing m, g, h, l, s, …, so that 3m would equal 3; math_grading reads units.
    normalization = LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    extraction = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)]

    @lru_cache(maxsize=4096)  # parsing is the slow part, and the samples of a group share their reference
    def read(latex: str) -> Any:
        # Boxed and first_match: the whole text is the answer. Otherwise parse picks any part that it can read.
        return parse(
            rf"\boxed{{{latex}}}",
            extraction,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,  # the alarm of this process is the time limit
        )

    def is_same(question: worker.Question) -> bool:
        answer, gold = question["answer"], question["gold"]
        if "=" not in gold and _EQUATION_TO_ZERO.fullmatch(answer):
            return False
        # math-verify takes the last side of an equation; in 17 = 18 or x = 9 + 8 = 18 the other sides must be right too.
        numeric = [side for side in re.split(r"(?<![<>!:])=", answer) if not _LETTER.search(side)]
        return all(compare(side, gold) for side in (numeric if len(numeric) > 1 else [answer]))

    def compare(answer: str, gold: str) -> bool:
        # x > 2 may stand for (2, ∞), but 1 < x < 2 not for (1, 2), which may be a point.
        gold_is_a_range = re.search(r"\\infty|\\in\b|\\cup|[][]", gold) is not None
        return bool(
            verify(
                read(gold),
                read(answer),
                float_rounding=10,  # decimals must agree to ten places; the default of six makes 0.333333 a third
                numeric_precision=30,
                allow_set_relation_comp=gold_is_a_range,
                timeout_seconds=None,
            )
        )

    is_same({"answer": r"\frac{1}{x}", "gold": "x^{-1}"})  # fills tables that later questions use
    return is_same


if __name__ == "__main__":
    worker.serve(_load, when_raised=False)
