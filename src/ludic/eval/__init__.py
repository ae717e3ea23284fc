"""Evaluation: runs episodes and reports accuracy, pass@k and ratings with confidence intervals.

`run` and `cli` import it; it imports `batch_gen`. Start with evaluator.py, then report.py.
"""

from ludic.eval.evaluator import (
    EngineEvaluator,
    PolicyEvaluator,
    SnapshotEvaluator,
    evaluate,
    report_policies,
    run_eval,
    run_eval_sync,
)
from ludic.eval.outcome import Outcome, outcome_of, outcomes_of, step_records
from ludic.eval.ratings import Match, Rating, elo_table, fit_elo, matches_of, round_robin
from ludic.eval.report import EvalReport, Grading, make_report, paired_difference
from ludic.eval.statistics import Estimate, majority_at_k, mean_estimate, pass_at_k, share_estimate

__all__ = [
    "EngineEvaluator", "PolicyEvaluator", "SnapshotEvaluator", "evaluate", "run_eval", "run_eval_sync",
    "EvalReport", "Grading", "make_report", "report_policies", "paired_difference",
    "Outcome", "outcome_of", "outcomes_of", "step_records",
    "Estimate", "mean_estimate", "share_estimate", "pass_at_k", "majority_at_k",
    "Match", "Rating", "fit_elo", "elo_table", "round_robin", "matches_of",
]  # fmt: skip
