"""The training passes of the Tinker server against `Trainer` with a peft LoRA, on the same data, without HTTP.

One step is forward_backward with the PPO loss and optim_step on a GRPO batch (groups that share a prompt). Ways are measured in
turns, and the fastest of each counts; with one thread in CPU seconds, which other processes change little.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/tinker_training.py --model tiny
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/tinker_training.py --model smollm2 --repeat 3
    .venv/bin/python benchmarks/tinker_training.py --model qwen --device cuda --groups 16
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import torch
from engine import clock, make, qwen, smollm2, tiny

from ludic.models.adapters import AdapterSpec
from ludic.training import Trainer, TrainerConfig, make_grpo
from ludic.training.learner.gradients import batch_facts
from ludic.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem
from ludic_tinker.learner import rows_of
from ludic_tinker.server.bodies import AdamSettings
from ludic_tinker.server.losses import Row
from ludic_tinker.server.runs import PassJob, PassOutput, TrainingBase, TrainingRun

MODELS = {"tiny": tiny, "smollm2": smollm2, "qwen": qwen}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def grpo_items(num_groups: int, group_size: int, prompt: int, reply: int, vocab: int) -> list[SAWItem]:
    rng = np.random.default_rng(0)
    items = []
    for _ in range(num_groups):
        begin = rng.integers(0, vocab, size=prompt)
        for _ in range(group_size):
            length = int(rng.integers(reply // 2, reply + 1))
            ids = np.concatenate([begin, rng.integers(0, vocab, size=length)]).astype(np.int32)
            logps = ActorTokenLogps(np.full(length, -np.log(vocab), dtype=np.float32))
            mask = np.arange(len(ids)) >= prompt
            items.append(SAWItem(ids, None, mask, float(rng.normal()), {}, SampleAttachments(actor_logps=logps)))
    return items


class Repeated:
    def __init__(self, items: list[SAWItem]) -> None:
        self._items = items

    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=list(self._items))


def trainer_step(model: Any, items: list[SAWItem], args: argparse.Namespace) -> Callable[[], Any]:
    """One step of `Trainer` with peft's LoRA on the same projections."""
    config = peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules=PROJECTIONS)
    cfg = TrainerConfig(
        lr=1e-6, max_seq_len=args.budget, micro_token_budget=args.budget, watch_entropy=args.entropy, seed=0
    )
    policy = peft.get_peft_model(copy.deepcopy(model), config)
    trainer = Trainer(model=policy, algo=make_grpo(), batch_source=Repeated(items), cfg=cfg)
    return trainer.train_step_sync


def server_step(base: TrainingBase, items: list[SAWItem], num_runs: int, spec: AdapterSpec) -> Callable[[], Any]:
    """One forward_backward and optim_step of every run, which have an equal share of the data."""
    data = rows_of(items, make_grpo().loss, batch_facts(items))
    rows = [Row(row.tokens, row.targets.astype(np.int64), row.loss_inputs) for row in data]
    runs: list[TrainingRun] = [base.new_run(spec) for _ in range(num_runs)]
    size = -(-len(rows) // num_runs)
    jobs = [PassJob(run, rows[n * size : (n + 1) * size], "ppo", {}) for n, run in enumerate(runs)]

    def step() -> None:
        assert all(isinstance(output, PassOutput) for output in base.compute(jobs))
        for run in runs:
            run.step(AdamSettings(learning_rate=1e-6))

    return step


def measure(steps: dict[str, Callable[[], Any]], repeat: int, device: str) -> dict[str, float]:
    """Seconds of the fastest step of each, after one to warm up."""
    best = dict.fromkeys(steps, float("inf"))
    for number in range(repeat + 1):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if number:
                best[name] = min(best[name], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--entropy", action="store_true", help="the trainer also watches entropy, as by default")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make(MODELS[args.model], args.device, dtype)
    items = grpo_items(args.groups, args.group_size, args.prompt, args.reply, model.config.vocab_size)
    base = TrainingBase(model, token_budget=args.budget)
    plain, with_head = AdapterSpec(rank=args.rank, seed=0, head=False), AdapterSpec(rank=args.rank, seed=0)
    several = f"server, {args.tenants} runs"
    steps = {
        "Trainer, peft": trainer_step(model, items, args),
        "server": server_step(base, items, 1, plain),
        "server, with the head": server_step(base, items, 1, with_head),
        several: server_step(base, items, args.tenants, plain),
    }
    seconds = measure(steps, args.repeat, args.device)
    num_tokens = sum(len(item.input_ids) for item in items)
    print(f"{args.model} on {args.device}, {len(items)} rows of {num_tokens} tokens, rank {args.rank}:")
    for name, found in seconds.items():
        relative = f"{seconds['Trainer, peft'] / found:.0%} of Trainer's speed"
        print(f"  {name:24} {1000 * found:9.1f} ms  {num_tokens / found:9.0f} tokens/s  {relative}")


if __name__ == "__main__":
    main()
