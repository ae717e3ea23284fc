"""The worked solutions of GSM8K as rollouts, to imitate before reinforcement, which needs right answers to find.

Shows: a data set of questions and solutions as rollouts: a scripted client answers, the env grades.
Needs: the questions from --data, or from the hub through `datasets` (pip install datasets).
Takes: seconds.

    python examples/gsm8k/solutions.py --data gsm8k_train.jsonl --output runs/solutions.jsonl
    python examples/sft.py --data runs/solutions.jsonl --out runs/gsm8k_sft --epochs 2 --batch-size 64 --lr 1e-4
    ludic train gsm8k --model runs/gsm8k_sft --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl

Why: smollm2-135m answers one question in a hundred. GRPO compares the answers to a question, and where all are wrong there is
nothing to compare (research/log.md has the run that did not learn).
"""
# ruff: noqa: T201 - a script prints

import asyncio
import re
from pathlib import Path
from typing import Any

import tyro

from ludic import registry
from ludic.agents import Agent
from ludic.batch_gen.requests.samples import read_samples
from ludic.cli.script import run_script
from ludic.context import FullDialog
from ludic.envs.gsm8k import GSM8KEnv
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.types import ConfigError, InferenceSpec, Rollout, SamplingParams, save_rollouts

LONG_ENOUGH = InferenceSpec(sampling=SamplingParams(max_tokens=4096))


def main(
    *,
    data: Path = Path("hub:openai/gsm8k:main:train"),
    limit: int | None = None,
    output: Path = Path("runs/solutions.jsonl"),
) -> None:
    """Args:
    data: A JSONL file of {"question": …, "answer": "… #### 42"}, or hub:NAME:CONFIG:SPLIT.
    limit: Only so many of the questions.
    output: The file to write; it must not exist yet.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already. Move it away, or choose another --output.")
    rollouts = asyncio.run(answer_all(read_samples(data)[:limit]))
    save_rollouts(rollouts, output)
    num_right = sum(rollout.total_reward >= 1.0 for rollout in rollouts)
    print(f"{num_right} of {len(rollouts)} solutions are graded right; all are in {output}")


async def answer_all(samples: list[dict[str, Any]]) -> list[Rollout]:
    rollouts: list[Rollout] = []
    for sample in samples:
        agent = Agent(
            client=ScriptedClient([re.sub(r"<<.*?>>", "", sample["answer"]).strip()]),  # without the calculator's notes
            model="solutions",
            ctx=FullDialog(),
            parser=registry.parsers.make("final_number"),
            chat_template=ByteTemplate(),
        )
        rollouts += await SingleAgentProtocol(agent).run(env=GSM8KEnv(sample), max_steps=1, inference=LONG_ENOUGH)
    return rollouts


if __name__ == "__main__":
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__))
