"""Judges: rewards from the judgement of a model. They are scorers (`ludic.types.Scorer`) for `ludic.rewards`.

`run` and `cli` import it. Start with llm.py (one reply), group.py (siblings); model.py asks and caches, verdicts.py delimits data
and reads replies, agentic.py lets an agent with tools answer, gold.py compares with known answers, lazy.py is `--judge`.
See docs/judges.md.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic_judges.agentic import JudgeAgent
    from ludic_judges.gold import Agreement, agreement, pair_accuracy
    from ludic_judges.group import GroupJudge, PairwiseJudge, PositionBias
    from ludic_judges.lazy import JudgeBy, LazyJudge
    from ludic_judges.llm import Criterion, LLMJudge, RubricJudge, read_criteria
    from ludic_judges.model import JudgeCost, JudgeModel, VerdictCache
    from ludic_judges.verdicts import Case, JudgeError, UnreadableVerdict, case_of, read_verdict

__all__ = [
    "LLMJudge", "RubricJudge", "Criterion", "read_criteria", "GroupJudge", "PairwiseJudge", "PositionBias",
    "JudgeModel", "JudgeAgent", "LazyJudge", "JudgeBy", "JudgeCost", "VerdictCache", "Case", "case_of",
    "JudgeError", "UnreadableVerdict",
    "read_verdict", "Agreement", "agreement", "pair_accuracy",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "agentic": "JudgeAgent",
        "gold": "Agreement agreement pair_accuracy",
        "group": "GroupJudge PairwiseJudge PositionBias",
        "lazy": "JudgeBy LazyJudge",
        "llm": "Criterion LLMJudge RubricJudge read_criteria",
        "model": "JudgeCost JudgeModel VerdictCache",
        "verdicts": "Case JudgeError UnreadableVerdict case_of read_verdict",
    },
)
