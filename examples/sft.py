"""Supervised fine-tuning on stored rollouts.

Shows: OfflineBatchSource on a JSONL file, any chat template, the trainer without an engine.
Needs: a model, and rollouts: of generate_synth_data.py, rejection_sampling.py, solutions.py, or `runs/NAME/rollouts` of a run.
Takes: 100 seconds per step of 8 tic-tac-toe moves with smollm2-135m on two busy CPU cores.

    python examples/sft.py --data runs/synth/games.jsonl --out runs/sft
    ludic train tic_tac_toe --model runs/sft

Rollouts are read as messages and rendered with this model's own template, whichever model wrote them. Every reply is a sample:
the conversation up to it is its prompt, the reply is what is learned.
"""
# ruff: noqa: T201 - a script prints

from pathlib import Path

import tyro

from ludic.batch_gen import OfflineBatchSource, make_chat_template_step_to_item
from ludic.cli.script import run_script
from ludic.models.loading import load_model
from ludic.training import CheckpointConfig, JSONLLogger, PrintLogger, TeeLogger, Trainer, TrainerConfig, make_sft
from ludic.types import ConfigError

SHOWN = ("nll_mean", "grad_norm", "epoch", "num_tokens", "tokens_per_s")


def main(
    *,
    data: Path,
    model: str = "smollm2-135m",
    out: Path = Path("runs/sft"),
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 8,
    lr: float = 2e-5,
    max_seq_len: int = 1024,
    checkpoint_every: int = 0,
    resume: bool = False,
) -> None:
    """Args:
    data: Rollouts to imitate.
    model: A folder, a hub id, or smollm2-135m.
    out: The run's folder: metrics.jsonl, and checkpoints that load like any model.
    epochs: Passes over the rollouts.
    steps: Stop earlier, after so many steps.
    batch_size: Replies per step.
    lr: Learning rate.
    max_seq_len: Longer samples are an error.
    checkpoint_every: Steps between checkpoints; one is always written at the end.
    resume: Go on with the run in --out.
    """
    if not resume and (out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {out} already. Go on with --resume, or choose another --out.")
    if not data.exists():
        raise ConfigError(f"There are no rollouts at {data}. Make some: examples/tic_tac_toe/generate_synth_data.py.")
    loaded = load_model(model)
    algo = make_sft(length_normalize=True)
    rollouts = OfflineBatchSource(
        data,
        step_to_item=make_chat_template_step_to_item(loaded.tokenizer),
        algorithm=algo,
        batch_size=batch_size,
    )
    trainer = Trainer(
        model=loaded.model,
        algo=algo,
        batch_source=rollouts,
        cfg=TrainerConfig(lr=lr, max_seq_len=max_seq_len),
        checkpoint_config=CheckpointConfig(out / "checkpoints", every_n_steps=checkpoint_every, max_to_keep=2),
        resume_from="latest" if resume else None,
        train_logger=TeeLogger(JSONLLogger(out / "metrics.jsonl"), PrintLogger(keys=SHOWN)),
        tokenizer=loaded.tokenizer,
    )
    num_steps = epochs * rollouts.num_batches_per_epoch
    num_steps = num_steps if steps is None else min(num_steps, steps)
    print(f"{rollouts.num_rollouts} rollouts, {len(rollouts)} replies: {num_steps} steps of {batch_size}", flush=True)
    trainer.train_sync(max(0, num_steps - trainer.step))
    assert trainer.checkpointer is not None, "it was given a checkpoint_config"
    print(f"The model is in {trainer.checkpointer.latest()}")


if __name__ == "__main__":
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__))
