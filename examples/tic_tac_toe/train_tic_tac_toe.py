"""Reinforcement learning in one process: a LoRA adapter, GRPO, and the engine that serves the weights being trained.

Shows: group-relative credit over whole games, evaluation on held-out games, checkpoints, resuming.
Needs: a model. One that names cells at all learns sooner: see sft_tic_tac_toe.py.
Takes: an estimated hour per step of 128 games with smollm2-135m on two CPU cores; take fewer there, or use a GPU.

    python examples/tic_tac_toe/train_tic_tac_toe.py --model runs/sft/checkpoints/step_…
    python examples/tic_tac_toe/train_tic_tac_toe.py --rollouts-per-update 32 --train-steps 5 --eval-episodes 50
"""
# ruff: noqa: T201 - a script prints

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from game import Game

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
from ludic.types import ConfigError, InferenceSpec, LudicError, MissingExtra, ReturnSpec, SamplingParams

NUM_GAMES = 1_000_000
"""Training games by their seeds; those of the evaluation come after them."""
SHOWN = (
    "avg_total_reward", "entropy", "parse_error_rate", "grad_norm", "step_s",
    "win_rate", "draw_rate", "loss_rate", "illegal_move_rate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(Game):
    """Who is trained, and how."""

    model: str = "smollm2-135m"
    """A folder, a hub id, or smollm2-135m."""
    out: Path = Path("runs/tic_tac_toe")
    """The run's folder: metrics.jsonl, checkpoints, and in the end the model."""
    resume: bool = False
    """Go on with the run in --out."""
    seed: int = 0

    train_steps: int = 30
    rollouts_per_update: int = 128
    """Games per step."""
    group_size: int = 8
    """Games that begin alike and are compared with each other."""
    concurrency: int = 64
    """Games at a time."""
    train_temperature: float = 1.0
    max_completion_tokens: int = 32
    """Of one reply; a model that thinks needs more."""
    positive_only: bool = False
    """Learn from what went better than its siblings only."""
    lr: float = 1e-4
    lora_rank: int = 8
    """0 trains all weights, which wants a lower --lr."""
    lora_alpha_mult: int = 2
    """LoRA's alpha, in ranks."""
    lora_dropout: float = 0.0
    max_seq_len: int = 1024
    micro_token_budget: int = 16384
    """Tokens in one forward pass; the gradient does not depend on it."""

    eval_before_start: bool = True
    eval_every: int = 10
    """Steps between evaluations; 0 is never."""
    eval_episodes: int = 200
    eval_concurrency: int = 32
    eval_temperature: float = 0.6
    checkpoint_every: int = 10
    max_to_keep: int = 2
    rollout_log: Path | None = None
    """A JSONL file for every game that is played."""

    def inference(self, temperature: float) -> InferenceSpec:
        sampling = SamplingParams(temperature=temperature, max_tokens=self.max_completion_tokens)
        return InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl())


def main(settings: Settings) -> None:
    if settings.rollouts_per_update % settings.group_size:
        raise ConfigError(
            f"--rollouts-per-update {settings.rollouts_per_update} is not a multiple of --group-size "
            f"{settings.group_size}; a step takes whole groups."
        )
    if not settings.resume and (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.out} already. Go on with --resume, or choose another --out.")
    loaded = load_model(settings.model)
    model = with_adapter(loaded.model, settings) if settings.lora_rank else loaded.model
    server = LocalEngine(model, loaded.tokenizer, seed=settings.seed)
    try:
        trainer = make_trainer(settings, model, server)
        trainer.train_sync(max(0, settings.train_steps - trainer.step))
    finally:
        server.close()
    if trainer.stop.is_set:
        print(f"Stopped after step {trainer.step} of {settings.train_steps}. Go on with --resume --out {settings.out}")
        return
    whole = model.merge_and_unload() if settings.lora_rank else model
    save(whole, loaded.tokenizer, settings.out / "model")


def with_adapter(model: Any, settings: Settings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"--lora-rank {settings.lora_rank}") from error
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha_mult * settings.lora_rank,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
    )
    return get_peft_model(model, config)


def make_trainer(settings: Settings, model: Any, server: LocalEngine) -> Trainer:
    algo = make_grpo(group_size=settings.group_size, positive_only=settings.positive_only, reduction="token_mean")
    engine = settings.rollout_engine(server, server.tokenizer, jsonl_path=settings.rollout_log, seed=settings.seed)
    games = RolloutBatchSource(
        engine,
        requests_fn=make_dataset_sequence_requests_fn(
            range(NUM_GAMES),
            batch_size=settings.rollouts_per_update // settings.group_size,
            group_size=settings.group_size,
            env_kind="tic_tac_toe",
            env_kwargs_fn=settings.env_kwargs,
            protocol_kind="player",
            inference=settings.inference(settings.train_temperature),
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=settings.max_steps_per_episode,
        concurrency=settings.concurrency,
    )
    held_out = settings.requests(
        range(NUM_GAMES, NUM_GAMES + settings.eval_episodes), settings.inference(settings.eval_temperature)
    )
    return Trainer(
        model=model,
        algo=algo,
        batch_source=games,
        cfg=TrainerConfig(
            lr=settings.lr,
            max_seq_len=settings.max_seq_len,
            micro_token_budget=settings.micro_token_budget,
            seed=settings.seed,
            eval_at_start=settings.eval_before_start,
            eval_every_n_steps=settings.eval_every,
            eval_concurrency=settings.eval_concurrency,
            eval_max_steps=settings.max_steps_per_episode,
        ),
        publisher=SharedWeightsPublisher(server),
        checkpoint_config=CheckpointConfig(
            settings.out / "checkpoints",
            every_n_steps=settings.checkpoint_every,
            max_to_keep=settings.max_to_keep,
            best_metric="eval/win_rate",
        ),
        resume_from="latest" if settings.resume else None,
        train_logger=TeeLogger(JSONLLogger(settings.out / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        evaluator=EngineEvaluator(settings.rollout_engine(server, server.tokenizer), lambda: held_out),
        tokenizer=server.tokenizer,
    )


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """As a plain model, the adapter merged in: every script here, and every other program, loads it by its folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"The model is in {folder}. Next: python examples/tic_tac_toe/eval_tic_tac_toe.py --model {folder}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"train_tic_tac_toe: {mistake}")
