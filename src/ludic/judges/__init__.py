"""Judges: rewards from the judgement of a model. They are scorers (`ludic.types.Scorer`) for `ludic.rewards`.

`run` and `cli` import it. Start with llm.py (one reply), group.py (siblings); model.py asks and caches, verdicts.py delimits data
and reads replies, agentic.py lets an agent with tools answer, agreement.py compares with known answers, lazy.py is `--judge`.
See docs/judges.md.
"""

from ludic.judges.agentic import JudgeAgent
from ludic.judges.agreement import Agreement, agreement, pair_accuracy
from ludic.judges.group import GroupJudge, PairwiseJudge, PositionBias
from ludic.judges.lazy import JudgeBy, LazyJudge
from ludic.judges.llm import Criterion, LLMJudge, RubricJudge, read_criteria
from ludic.judges.model import JudgeCost, JudgeModel, VerdictCache
from ludic.judges.verdicts import Case, JudgeError, UnreadableVerdict, case_of, read_verdict

__all__ = [
    "LLMJudge", "RubricJudge", "Criterion", "read_criteria", "GroupJudge", "PairwiseJudge", "PositionBias",
    "JudgeModel", "JudgeAgent", "LazyJudge", "JudgeBy", "JudgeCost", "VerdictCache", "Case", "case_of",
    "JudgeError", "UnreadableVerdict",
    "read_verdict", "Agreement", "agreement", "pair_accuracy",
]  # fmt: skip
