"""DPO, IPO or KTO on stored preferences.

Shows: PreferenceBatchSource on a file of pairs or labels, a frozen copy as the reference, the trainer without an engine.
Needs: a model and preferences, one JSON object per line: {"prompt": …, "chosen": …, "rejected": …}, or for KTO
{"prompt": …, "completion": …, "label": true}; nothing for --model tiny --data demo.
Takes: seconds for the tiny model.

    python examples/dpo.py --model tiny --data demo --lr 1e-3 --steps 20
    python examples/dpo.py --data preferences.jsonl --algo ipo --out runs/ipo
"""
# ruff: noqa: T201 - a script prints

import copy
from pathlib import Path
from typing import Any, Literal

import tyro

from ludic.batch_gen import PreferenceBatchSource
from ludic.cli.script import run_script
from ludic.inference import HFChatTemplate
from ludic.models.loading import load_model
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    PrintLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    make_dpo,
    make_ipo,
    make_kto,
)
from ludic.types import ConfigError

SHOWN = (
    "loss",
    "margin",
    "preference_accuracy",
    "wanted_reward",
    "unwanted_reward",
    "kl_baseline",
    "grad_norm",
    "epoch",
)
MAKE = {"dpo": make_dpo, "ipo": make_ipo, "kto": make_kto}


def demo(algo: str) -> list[dict[str, Any]]:
    """Sums with a short right answer and a rambling one."""
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    pairs = [
        {"prompt": f"{a} + {b} = ?", "chosen": f"{a + b}", "rejected": f"Well, maybe {a * b + 3}?"} for a, b in sums
    ]
    if algo != "kto":
        return pairs
    keys = [("chosen", True), ("rejected", False)]
    return [{"prompt": row["prompt"], "completion": row[key], "label": label} for row in pairs for key, label in keys]


def main(
    *,
    data: str,
    algo: Literal["dpo", "ipo", "kto"] = "dpo",
    model: str = "smollm2-135m",
    out: Path = Path("runs/dpo"),
    beta: float = 0.1,
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 16,
    lr: float = 1e-6,
    max_seq_len: int = 1024,
    resume: bool = False,
) -> None:
    """Args:
    data: A file of preferences, hub:NAME:SPLIT, or demo.
    algo: The loss.
    model: A folder, a hub id, smollm2-135m, or tiny.
    out: The run's folder: metrics.jsonl, and checkpoints that load like any model.
    beta: How far the policy may go from the reference; smaller is further.
    epochs: Passes over the preferences.
    steps: This many steps instead.
    batch_size: Pairs, or labelled samples, per step.
    lr: Learning rate.
    max_seq_len: Longer samples are an error.
    resume: Go on with the run in --out.
    """
    if not resume and (out / "metrics.jsonl").exists():
        raise ConfigError(f"There is a run in {out} already. Go on with --resume, or choose another --out.")
    loaded = load_model(model)
    source = PreferenceBatchSource(
        demo(algo) if data == "demo" else data, HFChatTemplate(loaded.tokenizer), batch_size=batch_size
    )
    if (source.kind == "labels") != (algo == "kto"):
        raise ConfigError(f"{data} holds {source.kind}; kto learns from labels, dpo and ipo from pairs.")
    trainer = Trainer(
        model=loaded.model,
        algo=MAKE[algo](beta=beta),
        batch_source=source,
        reference=copy.deepcopy(loaded.model),
        cfg=TrainerConfig(lr=lr, max_seq_len=max_seq_len),
        checkpoint_config=CheckpointConfig(out / "checkpoints", every_n_steps=0, max_to_keep=1),
        resume_from="latest" if resume else None,
        train_logger=TeeLogger(JSONLLogger(out / "metrics.jsonl"), PrintLogger(keys=SHOWN)),
        tokenizer=loaded.tokenizer,
    )
    num_steps = epochs * source.num_batches_per_epoch if steps is None else steps
    print(f"{len(source)} preferences: {num_steps} steps of {batch_size}", flush=True)
    trainer.train_sync(max(0, num_steps - trainer.step))
    assert trainer.checkpointer is not None, "it was given a checkpoint_config"
    print(f"The model is in {trainer.checkpointer.latest()}")


if __name__ == "__main__":
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__))
