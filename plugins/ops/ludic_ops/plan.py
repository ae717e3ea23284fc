"""`ludic plan`: one table of the memory per GPU, for each way of training a model and of serving it, and what fits.

The arithmetic is ludic_ops.scaling; docs/scaling.md explains the columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from ludic.cli.args import parse
from ludic.types import ConfigError
from ludic_ops.scaling import (
    GIB,
    SERVER_WORKSPACE,
    SHAPES,
    ModelShape,
    TrainingSetup,
    read_shape,
    serving_memory,
    training_memory,
)

USABLE = 0.9
"""Share of a GPU that is counted on; the rest is for fragments, the CUDA context and NCCL."""
_KNOWN = f"A config.json, a folder with one, or a known shape: {', '.join(SHAPES)}"
_COLUMNS = ("model", "GPUs", "kept", "gathered", "buffers", "activations", "working", "peak", "fits", "note")


@dataclass(frozen=True)
class PlanArgs:
    """Memory per GPU, and what fits. It predicts no speed and searches for no split: every way is a row of the table."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL…", help=f"{_KNOWN}.")] = ()
    gpus: int = 8
    """GPUs of all machines together."""
    inference_gpus: int | None = None
    """Those of them that generate. Else half."""
    gpu_memory: float = 141.0
    """GiB of one GPU."""
    max_tokens: int = 4096
    """The longest sample, prompt included."""
    micro_token_budget: int = 16_384
    """Tokens of one forward pass on one GPU."""
    lora_rank: int = 0
    """Train an adapter; 0 trains all weights."""
    offload_activations: bool = False
    """Keep activations in the host's memory (`ludic train --offload-activations`)."""


def plan(args: list[str]) -> int:
    given = parse(PlanArgs, args, prog="ludic plan")
    gpus, max_tokens, budget = given.gpus, given.max_tokens, given.micro_token_budget
    if not given.models:
        raise ConfigError(f"Which model? Give one or more. {_KNOWN}.")
    inference = gpus // 2 if given.inference_gpus is None else given.inference_gpus
    if gpus < 1 or not (gpus > 1) <= inference < gpus:
        raise ConfigError(
            f"--inference-gpus {inference} of --gpus {gpus}: at least one GPU generates and at least one trains; a single GPU "
            "does both, with --inference-gpus 0."
        )
    if given.gpu_memory <= 0 or not 1 <= max_tokens <= budget:
        raise ConfigError(
            f"--gpu-memory {given.gpu_memory:g} must be above 0, and --micro-token-budget {budget} must hold the longest sample, "
            f"--max-tokens {max_tokens}."
        )
    usable, shapes = int(given.gpu_memory * USABLE * GIB), [read_shape(model) for model in given.models]
    print(
        f"GiB on one GPU, of which {usable / GIB:.1f} can be used; {gpus - inference} to train, {inference} to generate.\n"
    )
    print(f"| {' | '.join(_COLUMNS)} |\n{'| --- ' * len(_COLUMNS)}|")
    unfit = []
    for shape in shapes:
        shared = max_tokens if gpus == 1 else 0
        setups = _setups(gpus - inference, budget, given.lora_rank, given.offload_activations)
        trains = [_print_training(shape, setup, usable, shared) for setup in setups]
        # GPUs of one copy of the model are on one machine, and divide its heads.
        copies = [size for size in (1, 2, 4, 8) if size <= inference and shape.heads % size == 0]
        serves = [_print_serving(shape, size, usable, max_tokens) for size in copies]
        if not any(trains) or (serves and not any(serves)):
            unfit.append(shape.name)
    if unfit:
        print(
            f"\n{', '.join(unfit)} does not fit. Needs less memory: a smaller --micro-token-budget or --max-tokens, --lora-rank, "
            "more GPUs."
        )
        return 1
    return 0


def _setups(ranks: int, budget: int, lora_rank: int, moves: bool) -> Iterator[TrainingSetup]:
    """The ways to train, each slower and smaller than the one before; every update has several micro-batches."""
    for checkpointing in (False, True):
        for sync in ("last", "every") if ranks > 1 else ("last",):
            for offload in (False, True) if (checkpointing, sync) == (True, "every") else (False,):
                yield TrainingSetup(
                    ranks=ranks, micro_tokens=budget, micro_batches=2, checkpointing=checkpointing,
                    sync_gradients=sync, offload=offload, lora_rank=lora_rank, offload_activations=moves,
                )  # fmt: skip


def _print_training(shape: ModelShape, setup: TrainingSetup, usable: int, shared_tokens: int) -> bool:
    """`shared_tokens`: of the longest sample, where the same GPU also generates, with the same weights."""
    memory = training_memory(shape, setup)
    copies = shape.joined_bytes if shared_tokens and not setup.lora_rank else 0
    peak = memory.peak + copies + shared_tokens * shape.cache_per_token
    name = [f"{setup.ranks} train", *(["LoRA"] if setup.lora_rank else []), *(["ckpt"] if setup.checkpointing else [])]
    name += [f"sync {setup.sync_gradients}"] if setup.ranks > 1 else []
    name += ["offload"] if setup.offload else []
    name += ["activations on host"] if setup.offload_activations else []
    notes = ["activations are an upper bound"] if setup.lora_rank else []
    notes += [f"{memory.host / GIB:.0f} GiB of the host's memory per GPU"] if memory.host else []
    if shared_tokens:
        room = max(0, usable - memory.peak - copies) // shape.cache_per_token
        notes.append(f"room for {room} tokens of the embedded engine")
    sizes = memory.kept, memory.gathered, memory.gradient_buffers, memory.activations, memory.working, peak
    return _print_row(shape, ", ".join(name), sizes, usable, "; ".join(notes))


def _print_serving(shape: ModelShape, size: int, usable: int, max_tokens: int) -> bool:
    memory = serving_memory(shape, usable=usable, tensor_parallel=size)
    cache = max_tokens * memory.cache_per_token
    peak = memory.weights + SERVER_WORKSPACE + cache
    note = f"room for {memory.tokens} tokens of keys and values"
    return _print_row(shape, f"{size} per copy", (memory.weights, 0, 0, cache, SERVER_WORKSPACE, peak), usable, note)


def _print_row(shape: ModelShape, gpus: str, sizes: tuple[int, ...], usable: int, note: str) -> bool:
    fits = sizes[-1] <= usable
    cells = [shape.name, gpus, *(f"{size / GIB:.1f}" for size in sizes), "yes" if fits else "no", note]
    print(f"| {' | '.join(cells)} |")
    return fits
