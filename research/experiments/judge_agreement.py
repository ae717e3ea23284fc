"""How far judges agree with gold answers: a model answers GSM8K questions, and judges who do not know the env's verdict grade it.

The replies of the policy are right or wrong by the env, which compares with the gold answer. Judges:

- alone: works the task out itself, then says whether the reply's answer is right;
- reference: the same, but is shown the gold answer;
- rubric: two criteria, the answer and the reasoning, each asked for in its own call; the verdict on the answer counts;
- pairwise: compares two siblings at a time, in both orders;
- ranking: ranks all siblings of a question at once, in two random orders.

Accuracy, Cohen's kappa and the rates of accepted right and wrong replies are for judges of single replies. "pairs" is the share of
pairs of a right and a wrong sibling in which the right one scores higher; 0.5 is chance. Judges of siblings see only questions with
right and wrong replies. "bias" is the position bias (first minus last), "same" how often both orders have the same winner.

    python research/experiments/judge_agreement.py --model FOLDER --data FILE                       # a GPU: Qwen2.5-1.5B, gsm8k_test.jsonl
    python research/experiments/judge_agreement.py --model tiny --data FILE --episodes 4 --samples 2 --max-tokens 16     # a CPU: to try it
"""

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.eval.config import resolve
from ludic.cli.eval.models import EvaluatedModel, OpenPolicy, evaluated_models, opened
from ludic.cli.eval.run import make_requests, read_command
from ludic.envs.gsm8k import GSM8KEnv
from ludic.eval import outcome_of
from ludic.run.given import env_factory
from ludic.run.parts.episodes import make_episode_setup
from ludic.types import Rollout, SamplingParams
from ludic.types.interfaces import BatchingClient
from ludic_judges import (
    Agreement,
    Case,
    Criterion,
    GroupJudge,
    JudgeError,
    JudgeModel,
    LLMJudge,
    PairwiseJudge,
    RubricJudge,
    agreement,
    case_of,
    pair_accuracy,
)

CORRECT = (
    "The final answer of the reply is the right answer to the task. Score 1 if it is, 0 if it is wrong or missing."
)
SOUND = "Each step of the reply follows from the task. Score 1 if so, 0 if a step is wrong or the reasoning is missing."
BETTER = "The better reply is the one whose final answer is right. Of two right ones, the clearer one is better."
WORK_OUT = "solve the task yourself in a few short steps, then compare your answer with the reply's final answer"
SAME = (
    "The final answer of the reply and the right answer are the same number. Score 1 if they are equal, 0 if they differ or the "
    "reply has no final answer. How the reply got there does not matter."
)
COMPARE = "the final answer of the reply is …, the right answer is …, so they are equal, or they are different"
KINDS = ("alone", "reference", "rubric", "pairwise", "ranking")


@dataclass(kw_only=True)
class Row:
    """What was measured of one judge."""

    kind: str
    num: int
    """Replies."""
    found: Agreement | None
    pairs: float | None
    metrics: dict[str, float]
    seconds: float

    def cells(self) -> list[str]:
        cost = self.metrics
        per = max(cost["judge/verdicts"] + cost["judge/failed"], 1)
        found = self.found
        return [
            self.kind,
            f"{self.num}",
            *([shown(value) for value in (found.accuracy, found.kappa, found.true_positive_rate, found.false_positive_rate)]
              if found else [""] * 4),
            shown(self.pairs),
            shown(cost.get("judge/position_bias")),
            shown(cost.get("judge/order_agreement")),
            f"{cost['judge/failed'] / per:.1%}",
            f"{cost['judge/unreadable'] / max(cost['judge/calls'], 1):.1%}",
            f"{cost['judge/calls']:,.0f}",
            f"{cost['judge/prompt_tokens']:,.0f}",
            f"{cost['judge/completion_tokens']:,.0f}",
            f"{cost['judge/cache_hits']:,.0f}",
            f"{self.seconds:.1f}",
        ]  # fmt: skip


HEAD = ["judge", "replies", "accuracy", "kappa", "right yes", "wrong yes", "pairs", "bias", "same", "failed", "unreadable",
        "calls", "prompt tok", "reply tok", "hits", "s"]  # fmt: skip


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def print_table(rows: Sequence[Row]) -> None:
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


# --- the replies ---


async def answer_questions(options: argparse.Namespace, policy: OpenPolicy, args: list[str]) -> list[Rollout]:
    command, config = read_command(args)
    found = env_factory(command.target)
    config = resolve(config, found)
    setup = make_episode_setup(config.env, config.agent, found, policy.client, policy.template, policy.model)
    requests = make_requests(setup, config, read_samples(options.data))
    engine = setup.engine(seed=options.seed, max_failed_share=1.0)
    return await engine.generate_rollouts(
        requests, max_steps=setup.max_steps, concurrency=config.measure.concurrency or setup.concurrency
    )


def case_with_gold(samples: Sequence[Any]) -> Callable[[Rollout], Case]:
    """Shows the gold answer of the rollout's question, also where the env could not read the reply."""

    def show(rollout: Rollout) -> Case:
        sample = samples[rollout.request_meta["sample_index"]]
        return replace(case_of(rollout), reference=GSM8KEnv(sample).target)

    return show


# --- the judges ---


async def grade_each(
    grade: Callable[[Case], Any], show: Callable[[Rollout], Case], rollouts: Sequence[Rollout]
) -> list[float | None]:
    async def one(rollout: Rollout) -> float | None:
        try:
            return float(await grade(show(rollout)))
        except JudgeError as error:
            print(f"  no verdict: {str(error)[:200]}", file=sys.stderr)
            return None

    return list(await asyncio.gather(*map(one, rollouts)))


async def grade_groups(
    judge: GroupJudge | PairwiseJudge, groups: Sequence[Sequence[Rollout]]
) -> list[list[float | None]]:
    async def one(group: Sequence[Rollout]) -> list[float | None]:
        try:
            return [scored[judge.name] for scored in await judge.score(group)]
        except JudgeError as error:
            print(f"  no verdict: {str(error)[:200]}", file=sys.stderr)
            return [None] * len(group)

    return list(await asyncio.gather(*map(one, groups)))


async def measure(
    kind: str, asking: JudgeModel, rollouts: Sequence[Rollout], correct: Sequence[bool], samples: Sequence[Any]
) -> Row:
    by_task: dict[int, list[int]] = defaultdict(list)
    for place, rollout in enumerate(rollouts):
        by_task[rollout.request_meta["sample_index"]].append(place)
    groups = list(by_task.values())
    began = time.perf_counter()
    if kind in ("pairwise", "ranking"):
        judge: GroupJudge | PairwiseJudge = (
            PairwiseJudge(asking, BETTER) if kind == "pairwise" else GroupJudge(asking, BETTER, orders=2)
        )
        groups = [places for places in groups if len({correct[i] for i in places}) == 2]
        found = await grade_groups(judge, [[rollouts[i] for i in places] for places in groups])
        scores: dict[int, float | None] = {
            i: score for places, row in zip(groups, found, strict=True) for i, score in zip(places, row, strict=True)
        }
        metrics = judge.metrics()
    else:
        show = case_with_gold(samples) if kind == "reference" else case_of
        if kind == "rubric":
            criteria = [Criterion(name="correct", text=CORRECT), Criterion(name="sound", text=SOUND)]
            rubric = RubricJudge(asking, criteria)

            async def grade(case: Case) -> float:
                return (await rubric.verdicts(case))["correct"]
        else:
            reason = COMPARE if kind == "reference" else WORK_OUT
            criterion = SAME if kind == "reference" else CORRECT
            grade = LLMJudge(asking, criterion, scale=(0, 1), reason=reason).grade
        scores = dict(enumerate(await grade_each(grade, show, rollouts)))
        metrics = asking.cost.metrics()
    seconds = time.perf_counter() - began
    is_single = kind not in ("pairwise", "ranking")
    graded = [[(score, correct[i]) for i in places if (score := scores.get(i)) is not None] for places in groups]
    is_any = any(score is not None for score in scores.values())
    return Row(
        kind=kind,
        num=len(scores),
        found=agreement([scores[i] for i in range(len(rollouts))], correct) if is_single and is_any else None,
        pairs=pair_accuracy(graded),
        metrics=metrics,
        seconds=seconds,
    )


async def run(options: argparse.Namespace) -> list[Row]:
    args = ["gsm8k", "--model", options.model, "--data", str(options.data), "--num-tasks", str(options.episodes),
            "--samples", str(options.samples), "--temperature", str(options.temperature), "--seed", str(options.seed),
            "--max-tokens", str(options.max_tokens)]  # fmt: skip
    _, config = read_command(args)
    samples = read_samples(options.data)
    (model,) = evaluated_models(config.policy)
    async with AsyncExitStack() as stack:

        async def open_model(one: EvaluatedModel) -> OpenPolicy:
            return await stack.enter_async_context(opened(one, config.policy, with_tools=False, seed=0))

        policy = await open_model(model)
        judge = policy
        if options.judge is not None:
            (other,) = evaluated_models(replace(config.policy, model=(options.judge,)))
            judge = await open_model(other)
        began = time.perf_counter()
        rollouts = [one for one in await answer_questions(options, policy, args) if one.failure is None]
        correct = [bool(outcome_of(one).correct) for one in rollouts]
        share, seconds = sum(correct) / len(correct), time.perf_counter() - began
        print(
            f"{options.model}: {len(rollouts)} replies to {options.episodes} questions, {share:.1%} right, {seconds:.1f} s"
        )
        print(f"Judge: {options.judge or options.model}, temperature {options.judge_temperature:g}", flush=True)
        rows = []
        sampling = SamplingParams(temperature=options.judge_temperature, max_tokens=options.judge_tokens)
        concurrency = judge.client.max_sequences if isinstance(judge.client, BatchingClient) else 64
        for kind in options.judges:
            asking = JudgeModel(
                judge.client, model=judge.model, chat_template=judge.template, sampling=sampling,
                concurrency=concurrency, max_retries=options.retries, seed=options.seed, cache=options.cache,
                prefill=options.prefill,
            )  # fmt: skip
            rows.append(await measure(kind, asking, rollouts, correct, samples))
            print(f"  {kind}: {rows[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--model", required=True, help="the policy, and the judge unless --judge is given; as for ludic eval"
    )
    arguments.add_argument("--data", type=Path, required=True, help="JSONL of GSM8K questions")
    arguments.add_argument("--judge", help="another model that judges")
    arguments.add_argument("--episodes", type=int, default=256, help="questions")
    arguments.add_argument("--samples", type=int, default=4, help="replies per question")
    arguments.add_argument("--max-tokens", type=int, default=400, help="of a reply")
    arguments.add_argument("--temperature", type=float, default=1.0, help="of the policy")
    arguments.add_argument("--judge-tokens", type=int, default=512, help="of a verdict")
    arguments.add_argument("--judge-temperature", type=float, default=0.0)
    arguments.add_argument("--retries", type=int, default=2, help="after an unreadable verdict")
    arguments.add_argument("--prefill", action="store_true", help="begin the verdict for the judge; for small models")
    arguments.add_argument("--judges", nargs="+", choices=KINDS, default=list(KINDS))
    arguments.add_argument("--cache", type=Path, help="JSONL file of verdicts; by default memory")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, help="write the numbers as JSON, too")
    options = arguments.parse_args()
    rows = asyncio.run(run(options))
    print()
    print_table(rows)
    if options.out is not None:
        facts = [
            {"judge": row.kind, "replies": row.num, "pairs": row.pairs, "seconds": row.seconds, **row.metrics}
            | ({} if row.found is None else {name: getattr(row.found, name) for name in AGREEMENT})
            for row in rows
        ]
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


AGREEMENT = (
    "accuracy",
    "kappa",
    "true_positives",
    "false_positives",
    "true_negatives",
    "false_negatives",
    "num_failed",
)

if __name__ == "__main__":
    main()
