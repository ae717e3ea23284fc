"""Supervised warm start on the worked solutions of GSM8K, so that reinforcement has right answers to find.

Shows: a data set of questions and solutions as rollouts (a scripted client answers), SFT on their tokens.
Needs: a model; the questions from --data, or from the hub through `datasets` (pip install datasets).
Takes: an estimated hour per pass with smollm2-135m on two CPU cores, half a minute on a GPU.

    python examples/gsm8k/sft_gsm8k.py --data gsm8k_train.jsonl
    ludic train gsm8k --model runs/gsm8k_sft/model --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl

Why: smollm2-135m answers one question in a hundred. GRPO compares the answers to a question, and where all are wrong there is
nothing to compare (docs/log.md has the run that did not learn).
"""
# ruff: noqa: T201 - a script prints

import asyncio
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from questions import Asking, Sample, load_questions, solver

from ludic.batch_gen import OfflineBatchSource
from ludic.envs.gsm8k import GSM8KEnv
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.models.loading import load_model
from ludic.training import JSONLLogger, RichLiveLogger, TeeLogger, Trainer, TrainerConfig, make_sft
from ludic.training.schedules import LRSchedule
from ludic.types import ConfigError, InferenceSpec, LudicError, save_rollouts

_CALCULATION = re.compile(r"<<.*?>>")
SHOWN = ("nll_mean", "grad_norm", "epoch", "num_tokens", "tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class Settings(Asking):
    """What is learned from, and how."""

    data: Path | None = None
    """A JSONL file of questions with worked answers; without it the training split from the hub."""
    limit: int | None = None
    """Only so many of the questions."""
    epochs: int = 2
    """Passes over the questions."""
    batch_size: int = 64
    lr: float = 1e-4
    max_seq_len: int = 1024
    micro_token_budget: int = 16384
    """Tokens in one forward pass; the gradient does not depend on it."""
    out: Path = Path("runs/gsm8k_sft")
    """The run's folder: the solutions as rollouts, metrics.jsonl, and in the end the model."""


def main(settings: Settings) -> None:
    if (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.out} already. Choose another --out.")
    samples = load_questions(settings.data, "train", settings.limit)
    loaded = load_model(settings.model)
    solutions = settings.out / "solutions.jsonl"
    asyncio.run(write_solutions(settings, samples, loaded.tokenizer, solutions))
    algo = make_sft(length_normalize=True)
    source = OfflineBatchSource(solutions, algorithm=algo, batch_size=settings.batch_size, chunk_rollouts=1024)
    num_steps = settings.epochs * source.num_batches_per_epoch
    print(f"{source.num_rollouts} solutions: {num_steps} steps of {settings.batch_size}", flush=True)
    trainer = Trainer(
        model=loaded.model,
        algo=algo,
        batch_source=source,
        cfg=TrainerConfig(
            lr=settings.lr,
            lr_schedule=LRSchedule("cosine", num_steps // 20, num_steps + 1),
            max_seq_len=settings.max_seq_len,
            too_long="drop",
            micro_token_budget=settings.micro_token_budget,
        ),
        train_logger=TeeLogger(JSONLLogger(settings.out / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        tokenizer=loaded.tokenizer,
    )
    trainer.train_sync(num_steps)
    if trainer.stop.is_set:
        raise ConfigError(
            f"Stopped after step {trainer.step} of {num_steps}; nothing is saved. Start again with another --out."
        )
    loaded.model.save_pretrained(settings.out / "model")
    loaded.tokenizer.save_pretrained(settings.out / "model")
    print(f"The model is in {settings.out / 'model'}")


async def write_solutions(settings: Settings, samples: list[Sample], tokenizer: Any, path: Path) -> None:
    """Every question, answered with its worked solution, as a rollout in the model's own tokens."""
    template = HFChatTemplate(tokenizer)
    inference = InferenceSpec(sampling=settings.sampling(0.0))
    rollouts = []
    for sample in samples:
        client = ScriptedClient([solution(sample)], tokenizer=tokenizer)
        protocol = solver(client, template, model=settings.model, parser=settings.parser)
        rollouts += await protocol.run(env=GSM8KEnv(sample), max_steps=1, inference=inference)
    save_rollouts(rollouts, path)
    num_right = sum(rollout.total_reward >= 1.0 for rollout in rollouts)
    print(f"{num_right} of {len(rollouts)} solutions are graded right", flush=True)


def solution(sample: Sample) -> str:
    """The worked answer without the calculator's notes; the last line stays `#### 42`."""
    return _CALCULATION.sub("", sample["answer"]).strip()


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"sft_gsm8k: {mistake}")
