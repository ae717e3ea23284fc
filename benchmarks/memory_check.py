"""The memory formulae of ludic_ops.scaling against one GPU: a few steps of real training, predicted and measured side by side.

Two shapes with random weights in bf16, two micro-batches per step, the optimizer and the loss of the trainer. "Kept" is the memory
between steps; the peaks are torch.cuda.max_memory_allocated while gradients are accumulated and while the optimizer
steps. What the allocator reserves beyond that, and the CUDA context, are not in it: `ludic plan` leaves a tenth for them.

    PYTHONPATH=src:benchmarks python3 benchmarks/memory_check.py                     # eager, with and without checkpointing
    PYTHONPATH=src:benchmarks python3 benchmarks/memory_check.py --compile --budget 32768
"""

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine import make, qwen, smollm2
from training import samples

from ludic.models.execution import compile_layers
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.optimizer import FullPrecisionAdamW
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic_ops.scaling import GIB, ModelShape, TrainingSetup, shape_from_config, training_memory

LENGTH, PROMPT_SHARE, MICRO_BATCHES = 1024, 0.3, 2
MODELS: dict[str, Callable[[], Any]] = {"135m": smollm2, "1.5b": qwen}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """One training setup, predicted or measured."""

    kept: int
    """Between steps: weights and optimizer."""
    backward: int
    """Peak while gradients are accumulated."""
    step: int
    """Peak while the optimizer steps."""


def predicted(shape: ModelShape, budget: int, *, checkpointing: bool) -> Bytes:
    setup = TrainingSetup(
        micro_tokens=budget,
        micro_batches=MICRO_BATCHES,
        action_share=1 - int(LENGTH * PROMPT_SHARE) / LENGTH,
        checkpointing=checkpointing,
    )
    memory = training_memory(shape, setup)
    return Bytes(kept=memory.weights + memory.optimizer, backward=memory.in_backward, step=memory.in_step)


def measured(model: Any, budget: int, *, compiled: bool, num_steps: int = 3) -> Bytes:
    """Of the last step: the first ones create the optimizer's state and compile."""
    policy = TrainedPolicy(model)
    if compiled:
        compile_layers(model)
    optimizer = FullPrecisionAdamW(model.parameters(), lr=1e-6, fused=True)
    items = samples([LENGTH] * (MICRO_BATCHES * budget // LENGTH), model.config.vocab_size, PROMPT_SHARE)
    kept = backward = step = 0
    for _ in range(num_steps):
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        accumulate_gradients(
            policy, TokenClippedSurrogateLoss(), items, micro_token_budget=budget, watch_entropy=True
        ).means()
        torch.cuda.synchronize()
        backward = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        step = torch.cuda.max_memory_allocated()
    return Bytes(kept=kept, backward=backward, step=step)


def compare(name: str, budget: int, *, checkpointing: bool, compiled: bool) -> None:
    before = torch.cuda.memory_allocated()
    model = make(MODELS[name], "cuda", torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shape = shape_from_config(model.config.to_dict(), name=name)
    ours, theirs = predicted(shape, budget, checkpointing=checkpointing), measured(model, budget, compiled=compiled)
    rows = (
        ("kept", ours.kept, theirs.kept),
        ("backward", ours.backward, theirs.backward),
        ("step", ours.step, theirs.step),
    )
    for what, paper, real in rows:
        real -= before  # left from the previous model
        print(
            f"| {name} | {budget} | {'yes' if checkpointing else 'no'} | {what} | {paper / GIB:.2f} | {real / GIB:.2f} | "
            f"{paper / real - 1:+.1%} |",
            flush=True,
        )
    del model
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--budget", type=int, default=16_384, help="micro_token_budget; a multiple of 1024")
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument(
        "--compile", action="store_true", help="compile the layers; the prediction stays that of eager"
    )
    options = arguments.parse_args()
    if options.budget % LENGTH:
        sys.exit(f"--budget {options.budget} is not a multiple of {LENGTH}, the length of the samples.")
    if not torch.cuda.is_available():
        sys.exit("This compares with a GPU, and there is none. On a CPU, plugins/ops/tests/test_measured.py does it.")
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {'compiled' if options.compile else 'eager'}, bf16"
    )
    print("| model | tokens | checkpointed | what | predicted GiB | measured GiB | difference |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        for checkpointing in (False, True):
            compare(name, options.budget, checkpointing=checkpointing, compiled=options.compile)


if __name__ == "__main__":
    main()
