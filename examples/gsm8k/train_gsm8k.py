"""Reinforcement learning on grade-school math: GRPO, the right number earns 1, in one process.

Shows: a dataset of questions as a task, held-out evaluation, full training or a LoRA adapter, resuming.
Needs: a model; the questions from --data and --eval-data, or from the hub through `datasets` (pip install datasets).
Takes: an estimated hour or more per step of 256 answers with smollm2-135m on two CPU cores; take fewer there, or use a GPU.

    python examples/gsm8k/train_gsm8k.py --data gsm8k_train.jsonl --eval-data gsm8k_test.jsonl
    python examples/gsm8k/train_gsm8k.py --model Qwen/Qwen2.5-1.5B-Instruct --parser boxed --lora-rank 16 --lr 1e-4
"""
# ruff: noqa: T201 - a script prints

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from questions import Asking, Sample, load_questions, rollout_engine

from ludic.batch_gen import RolloutBatchSource, make_dataset_sequence_requests_fn
from ludic.distributed import SharedWeightsPublisher
from ludic.eval import EngineEvaluator
from ludic.inference.local import LocalEngine
from ludic.models.loading import load_model
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    RichLiveLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    make_grpo,
)
from ludic.types import ConfigError, InferenceSpec, LudicError, MissingExtra, ReturnSpec

SHOWN = (
    "avg_total_reward", "parse_error_rate", "completion_truncated_rate", "avg_completion_length", "entropy", "grad_norm",
    "step_s", "accuracy", "accuracy_low", "accuracy_high", "truncation_rate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(Asking):
    """Who is trained on what, and how."""

    data: Path | None = None
    """A JSONL file of questions to train on; without it the training split from the hub."""
    eval_data: Path | None = None
    """A JSONL file of other questions; without it the test split from the hub, or with --data no evaluation."""
    out: Path = Path("runs/gsm8k")
    """The run's folder: metrics.jsonl, checkpoints, and in the end the model."""
    resume: bool = False
    """Go on with the run in --out."""
    seed: int = 0

    train_steps: int = 100
    rollouts_per_update: int = 256
    """Answers per step."""
    group_size: int = 8
    """Answers per question, which are compared with each other."""
    concurrency: int = 256
    """Answers at a time."""
    train_temperature: float = 1.0
    lr: float = 1e-5
    lora_rank: int = 0
    """0 trains all weights; an adapter wants a higher --lr, such as 1e-4."""
    max_seq_len: int = 1024
    """Question and answer."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass; the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Less memory, slower."""

    eval_before_start: bool = True
    eval_every: int = 20
    """Steps between evaluations; 0 is never."""
    eval_limit: int = 1000
    """Questions per evaluation."""
    eval_temperature: float = 0.0
    """0 is greedy."""
    checkpoint_every: int = 20
    max_to_keep: int = 2


def main(settings: Settings) -> None:
    if settings.rollouts_per_update % settings.group_size:
        raise ConfigError(
            f"--rollouts-per-update {settings.rollouts_per_update} is not a multiple of --group-size "
            f"{settings.group_size}; a step takes whole groups."
        )
    if not settings.resume and (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.out} already. Go on with --resume, or choose another --out.")
    train = load_questions(settings.data, "train")
    is_evaluated = settings.data is None or settings.eval_data is not None
    held_out = load_questions(settings.eval_data, "test", settings.eval_limit) if is_evaluated else []
    print(f"{len(train)} questions to train on, {len(held_out)} held out", flush=True)
    loaded = load_model(settings.model)
    model = with_adapter(loaded.model, settings.lora_rank) if settings.lora_rank else loaded.model
    server = LocalEngine(model, loaded.tokenizer, seed=settings.seed)
    try:
        trainer = make_trainer(settings, model, server, train, held_out)
        trainer.train_sync(max(0, settings.train_steps - trainer.step))
    finally:
        server.close()
    if trainer.stop.is_set:
        print(f"Stopped after step {trainer.step} of {settings.train_steps}. Go on with --resume --out {settings.out}")
        return
    whole = model.merge_and_unload() if settings.lora_rank else model
    whole.save_pretrained(settings.out / "model")
    loaded.tokenizer.save_pretrained(settings.out / "model")
    print(f"The model is in {settings.out / 'model'}. Next: python examples/gsm8k/eval_gsm8k.py --model that folder")


def with_adapter(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"--lora-rank {rank}") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def make_trainer(
    settings: Settings, model: Any, server: LocalEngine, train: list[Sample], held_out: list[Sample]
) -> Trainer:
    algo = make_grpo(group_size=settings.group_size, reduction="token_mean")
    engine = rollout_engine(server, server.tokenizer, seed=settings.seed)
    answers = RolloutBatchSource(
        engine,
        requests_fn=make_dataset_sequence_requests_fn(
            train,
            batch_size=settings.rollouts_per_update // settings.group_size,
            group_size=settings.group_size,
            env_kind="gsm8k",
            protocol_kind=settings.solver.kind,
            protocol_kwargs=settings.solver.kwargs,
            inference=InferenceSpec(
                sampling=settings.sampling(settings.train_temperature), return_=ReturnSpec.for_rl()
            ),
            shuffle=True,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=1,
        concurrency=settings.concurrency,
    )
    asked = settings.requests(held_out, InferenceSpec(sampling=settings.sampling(settings.eval_temperature)))
    evaluator = EngineEvaluator(rollout_engine(server, server.tokenizer), lambda: asked) if asked else None
    return Trainer(
        model=model,
        algo=algo,
        batch_source=answers,
        cfg=TrainerConfig(
            lr=settings.lr,
            max_seq_len=settings.max_seq_len,
            too_long="drop",  # a question that leaves no room for its answer
            micro_token_budget=settings.micro_token_budget,
            gradient_checkpointing=settings.gradient_checkpointing,
            seed=settings.seed,
            eval_at_start=settings.eval_before_start and evaluator is not None,
            eval_every_n_steps=settings.eval_every if evaluator is not None else None,
            eval_concurrency=settings.concurrency,
        ),
        publisher=SharedWeightsPublisher(server),
        checkpoint_config=CheckpointConfig(
            settings.out / "checkpoints",
            every_n_steps=settings.checkpoint_every,
            max_to_keep=settings.max_to_keep,
            best_metric="eval/accuracy",
        ),
        resume_from="latest" if settings.resume else None,
        train_logger=TeeLogger(JSONLLogger(settings.out / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        evaluator=evaluator,
        tokenizer=server.tokenizer,
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"train_gsm8k: {mistake}")
