"""FSDP2 against the plain trainer: equality of results, and cost.

- same: loss and gradient of one batch on one process and on two, in fp32, and their difference;
- speed: trained tokens per second of the plain trainer, of FSDP2 on one process, and of FSDP2 on two. On a GPU only the
  first two (the overhead at world size 1), with peak memory.

    .venv/bin/python research/experiments/fsdp.py                     # what this machine has
    .venv/bin/python research/experiments/fsdp.py --only speed --model qwen-1.5b

Each measurement is a separate group of processes, started by torchrun, with one thread per process on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from engine import make, qwen, smollm2, tiny
from training import samples, skewed_lengths

from ludic.distributed.fsdp import FSDPSettings, shard_model
from ludic.distributed.ranks import Ranks, join_ranks, leave_ranks
from ludic.models.lora import dense_parameters
from ludic.training import Trainer, TrainerConfig, make_grpo
from ludic.training.learner.gradients import accumulate_gradients, batch_facts
from ludic.training.learner.packing import balanced_shares
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import SAWBatch, SAWItem

ON_GPU = torch.cuda.is_available()
MODELS = {"tiny": tiny, "smollm2-135m": smollm2, "qwen-1.5b": qwen}
NUM_WARM, NUM_MEASURED = 2, 4


class Again:
    """The same batch at every step."""

    def __init__(self, items: list[SAWItem]) -> None:
        self._items = items

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=list(self._items))


# --- one group of processes ---


def same(args: argparse.Namespace, ranks: Ranks, is_sharded: bool) -> dict[str, Any]:
    """Loss and full gradients of one batch; gradients are written to a file."""
    model = make(MODELS[args.model], "cpu", torch.float32)
    if is_sharded:
        model = shard_model(model, FSDPSettings(param_dtype="fp32"), device="cpu")
    items = samples(skewed_lengths(16, 16, 128), model.config.vocab_size)
    share = balanced_shares(items, ranks.world_size)[ranks.rank]
    sums = accumulate_gradients(
        TrainedPolicy(model),
        TokenClippedSurrogateLoss(),
        share,
        micro_token_budget=256,
        facts=batch_facts(items),
        ranks=ranks,
    )
    loss = ranks.sum(sums.totals().sums["loss"][0])
    for parameter in model.parameters():  # gathered one by one, like weights
        parameter.data.copy_(parameter.grad)
    gradients = {name: weight.clone() for name, weight in dense_parameters(model)}
    if ranks.is_first:
        torch.save(gradients, args.out.with_suffix(".pt"))
    return {"loss": loss, "gradients": str(args.out.with_suffix(".pt"))}


def speed(args: argparse.Namespace, ranks: Ranks, is_sharded: bool) -> dict[str, Any]:
    device = "cuda" if ON_GPU else "cpu"
    model = make(MODELS[args.model], device, torch.float32)
    if is_sharded:
        model = shard_model(model, FSDPSettings(gradient_checkpointing=args.checkpointing))
    items = samples(skewed_lengths(args.samples, 16, 1024 if ON_GPU else 128), model.config.vocab_size)
    trainer = Trainer(
        model=model, algo=make_grpo(group_size=4), batch_source=Again(items) if ranks.is_first else None, ranks=ranks,
        cfg=TrainerConfig(
            lr=1e-6, max_seq_len=1024, micro_token_budget=args.budget, gradient_checkpointing=args.checkpointing and not is_sharded
        ),
    )  # fmt: skip
    history = [trainer.train_step_sync() for _ in range(NUM_WARM + NUM_MEASURED)][NUM_WARM:]
    seconds = sorted(stats["perf/update_s"] for stats in history)[len(history) // 2]
    return {
        "tokens_per_s": history[0]["train/num_tokens"] / seconds,
        "num_tokens": history[0]["train/num_tokens"],
        "micro_batches": history[0]["train/num_micro_batches"],
        "loss": history[0]["train/loss"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,
    }


PARTS = {"same": same, "speed": speed}


def as_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(torch.get_num_threads() if ON_GPU else 1)
    is_sharded = args.world > 0
    ranks = join_ranks(device="cpu" if args.part == "same" else None) if is_sharded else Ranks()
    found = PARTS[args.part](args, ranks, is_sharded)
    if ranks.is_first:
        args.out.write_text(json.dumps(found))
    leave_ranks()


# --- start and compare groups ---


def measured(part: str, world: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`world` 0 is the plain trainer, without a group."""
    out = folder / f"{part}-{world}.json"
    runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world else []
    own = [__file__, "--part", part, "--world", str(world), "--out", str(out), "--model", args.model]
    own += [
        "--budget",
        str(args.budget),
        "--samples",
        str(args.samples),
        *(["--checkpointing"] if args.checkpointing else []),
    ]
    threads = {} if ON_GPU else {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *runner, *own], check=True, timeout=900, env={**os.environ, **threads})
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def show_same(args: argparse.Namespace, folder: Path) -> None:
    plain = measured("same", 0, args, folder)
    expected = torch.load(plain["gradients"], weights_only=True)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    print(f"\nsame ({args.model}, fp32, CPU): loss {plain['loss']:.7f}, largest gradient {largest:.2e}")
    print(f"{'processes':>10} {'loss':>12} {'off by':>9} {'gradient off by at most':>24}")
    for world in (1, 2):
        found = measured("same", world, args, folder)
        gradients = torch.load(found["gradients"], weights_only=True)
        off = max(float((gradients[name] - gradient).abs().max()) for name, gradient in expected.items())
        print(f"{world:>10} {found['loss']:>12.7f} {abs(found['loss'] - plain['loss']):>9.1e} {off:>24.1e}")
        if off > 1e-5 or abs(found["loss"] - plain["loss"]) > 1e-5:
            raise SystemExit("the gradient depends on the number of processes")


def show_speed(args: argparse.Namespace, folder: Path) -> None:
    worlds = (0, 1) if ON_GPU else (0, 1, 2)
    names = {0: "plain trainer", 1: "FSDP2, 1 process", 2: "FSDP2, 2 processes"}
    rows = {world: measured("speed", world, args, folder) for world in worlds}
    print(f"\nspeed ({args.model}, {rows[0]['num_tokens']:.0f} tokens a step, {'GPU' if ON_GPU else 'CPU'})")
    print(f"{'':>20} {'tokens/s':>10} {'against plain':>14} {'micro-batches':>14} {'loss':>10} {'peak GiB':>9}")
    for world, row in rows.items():
        share, peak = row["tokens_per_s"] / rows[0]["tokens_per_s"], row["peak_gib"]
        shown = f"{peak:.2f}" if peak is not None else "–"
        print(
            f"{names[world]:>20} {row['tokens_per_s']:>10.0f} {share:>13.2f}× {row['micro_batches']:>14.0f} "
            f"{row['loss']:>10.5f} {shown:>9}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["same", "speed"])
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m" if ON_GPU else "tiny")
    parser.add_argument("--budget", type=int, default=16384 if ON_GPU else 1024)
    parser.add_argument("--samples", type=int, default=256 if ON_GPU else 128)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        as_rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "speed":
            show_same(args, Path(folder))
        if args.only != "same":
            show_speed(args, Path(folder))


if __name__ == "__main__":
    main()
