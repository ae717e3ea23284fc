"""How many word problems a model solves: accuracy, pass@k and majority@k, with 95 % confidence intervals.

Shows: ludic.eval with several samples per question, a resumable record of every answer.
Needs: a model; the questions from --data, or from the hub through `datasets` (pip install datasets).
Takes: an estimated five seconds per question with smollm2-135m on a CPU core.

    python examples/gsm8k/eval_gsm8k.py --data gsm8k_test.jsonl --limit 100
    python examples/gsm8k/eval_gsm8k.py --model runs/gsm8k/model --num-samples 8 --temperature 0.8 --k 1 4 8

An answer that cannot be read, or was cut off, is a wrong answer.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from questions import Asking, load_questions, rollout_engine

from ludic.eval import EvalReport, Grading, evaluate
from ludic.inference.local import LocalEngine
from ludic.types import ConfigError, InferenceSpec, LudicError


@dataclass(frozen=True, kw_only=True)
class Settings(Asking):
    """Whom to evaluate, on what."""

    data: Path | None = None
    """A JSONL file of questions; without it the test split from the hub."""
    limit: int = 1000
    """Take the first so many questions."""
    num_samples: int = 1
    """Answers per question."""
    k: tuple[int, ...] = ()
    """Report pass@k and majority@k for these; each at most --num-samples."""
    temperature: float = 0.0
    """0 is greedy, and the same answer every time."""
    concurrency: int = 64
    """Answers at a time."""
    out: Path | None = None
    """A JSONL file for the answers; started again, the evaluation goes on where it stopped."""


def main(settings: Settings) -> None:
    if settings.num_samples > 1 and settings.temperature == 0:
        raise ConfigError(f"--num-samples {settings.num_samples} at --temperature 0 would be one answer many times.")
    if any(k > settings.num_samples for k in settings.k):
        raise ConfigError(f"--k {max(settings.k)} needs as many answers per question: --num-samples {max(settings.k)}.")
    report = asyncio.run(ask(settings))
    print(f"{settings.model}: {report.metrics['num_tasks']:.0f} questions, {settings.num_samples} answers to each")
    for name, estimate in report.estimates.items():
        print(f"{name:16} {estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]")
    for name in ("parse_error_rate", "truncation_rate", "failed_rate", "mean_completion_tokens"):
        print(f"{name:16} {report.metrics[name]:.3f}")


async def ask(settings: Settings) -> EvalReport:
    samples = load_questions(settings.data, "test", settings.limit)
    server = LocalEngine(settings.model)
    try:
        return await evaluate(
            rollout_engine(server, server.tokenizer, jsonl_path=settings.out, resume=settings.out is not None),
            settings.requests(
                samples, InferenceSpec(sampling=settings.sampling(settings.temperature)), settings.num_samples
            ),
            grading=Grading(pass_k=settings.k, majority_k=settings.k),
            concurrency=settings.concurrency,
        )
    finally:
        server.close()


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"eval_gsm8k: {mistake}")
