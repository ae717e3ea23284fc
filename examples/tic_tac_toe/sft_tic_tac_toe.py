"""Supervised fine-tuning on stored games.

Shows: OfflineBatchSource on the JSONL of generate_synth_data.py, any chat template, the trainer without an engine.
Needs: a model, and games to learn from.
Takes: 100 seconds per step of 8 moves with smollm2-135m on two busy CPU cores.

    python examples/tic_tac_toe/sft_tic_tac_toe.py --data runs/synth/games.jsonl
    python examples/tic_tac_toe/eval_tic_tac_toe.py --model runs/sft/checkpoints/step_…

The games are read as messages and rendered with this model's own template, whoever played them. Every move is a sample: the
conversation up to it is its prompt, the move what is learned.
"""
# ruff: noqa: T201 - a script prints

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from ludic.batch_gen import OfflineBatchSource, make_chat_template_step_to_item
from ludic.models.loading import load_model
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    RichLiveLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    make_sft,
)
from ludic.types import ConfigError, LudicError

SHOWN = ("nll_mean", "grad_norm", "epoch", "num_tokens", "tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is learned from, and how."""

    data: Path
    """Games, as generate_synth_data.py writes them."""
    model: str = "smollm2-135m"
    """A folder, a hub id, or smollm2-135m."""
    epochs: int = 1
    """Passes over the games."""
    train_steps: int | None = None
    """Stop earlier, after so many steps."""
    batch_size: int = 8
    """Moves per step."""
    lr: float = 2e-5
    max_grad_norm: float = 1.0
    max_seq_len: int = 1024
    """Longer samples are an error."""
    micro_token_budget: int = 8192
    """Tokens in one forward pass; the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Less memory, slower."""
    out: Path = Path("runs/sft")
    """The run's folder: metrics.jsonl, and checkpoints that load like any model."""
    checkpoint_every: int = 0
    """Steps between checkpoints; one is always written at the end."""
    max_to_keep: int = 2
    """Of the newest checkpoints."""
    log_every: int = 10
    resume: bool = False
    """Go on with the run in --out."""


def main(settings: Settings) -> None:
    if not settings.resume and (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {settings.out} already. Go on with --resume, or choose another --out.")
    if not settings.data.exists():
        raise ConfigError(f"There are no games at {settings.data}. Make some: generate_synth_data.py --output …")
    loaded = load_model(settings.model)
    algo = make_sft()
    games = OfflineBatchSource(
        settings.data,
        step_to_item=make_chat_template_step_to_item(loaded.tokenizer),
        algorithm=algo,
        batch_size=settings.batch_size,
    )
    trainer = Trainer(
        model=loaded.model,
        algo=algo,
        batch_source=games,
        cfg=TrainerConfig(
            lr=settings.lr,
            max_grad_norm=settings.max_grad_norm,
            max_seq_len=settings.max_seq_len,
            micro_token_budget=settings.micro_token_budget,
            gradient_checkpointing=settings.gradient_checkpointing,
            log_every=settings.log_every,
        ),
        checkpoint_config=CheckpointConfig(
            settings.out / "checkpoints",
            every_n_steps=settings.checkpoint_every,
            max_to_keep=settings.max_to_keep,
        ),
        resume_from="latest" if settings.resume else None,
        train_logger=TeeLogger(JSONLLogger(settings.out / "metrics.jsonl"), RichLiveLogger(keys=SHOWN)),
        tokenizer=loaded.tokenizer,
    )
    in_all = settings.epochs * games.num_batches_per_epoch
    num_steps = in_all if settings.train_steps is None else min(in_all, settings.train_steps)
    print(f"{games.num_rollouts} games, {len(games)} moves: {num_steps} steps of {settings.batch_size}", flush=True)
    trainer.train_sync(max(0, num_steps - trainer.step))
    print(f"The model is in {trainer.checkpointer.latest()}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"sft_tic_tac_toe: {mistake}")
