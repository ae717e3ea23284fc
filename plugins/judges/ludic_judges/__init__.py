"""Judges: rewards from the judgement of a model. They are scorers (`ludic.types.Scorer`) for `ludic.rewards`.

Start with llm.py (one reply), group.py (siblings); model.py asks a model, or an agent with tools, and
caches; verdicts.py delimits data and reads replies; rescoring.py scores stored rollouts and compares with known answers; lazy.py is
`--judge`.
See docs/judges.md.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic_judges.group import GroupJudge, PairwiseJudge, PositionBias
    from ludic_judges.lazy import JudgeBy, LazyJudge
    from ludic_judges.llm import Criterion, LLMJudge, RubricJudge, read_criteria
    from ludic_judges.model import JudgeAgent, JudgeCost, JudgeModel, VerdictCache
    from ludic_judges.rescoring import Agreement, agreement, pair_accuracy
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
        "group": "GroupJudge PairwiseJudge PositionBias",
        "lazy": "JudgeBy LazyJudge",
        "llm": "Criterion LLMJudge RubricJudge read_criteria",
        "model": "JudgeAgent JudgeCost JudgeModel VerdictCache",
        "rescoring": "Agreement agreement pair_accuracy",
        "verdicts": "Case JudgeError UnreadableVerdict case_of read_verdict",
    },
)
