"""`ludic plan`: what fits on how many GPUs, how fast it would be, and how to divide them. See docs/scaling.md."""

from typing import Annotated, Literal

import typer

from ludic.scaling import (
    SHAPES,
    Change,
    Hardware,
    Job,
    Plan,
    PlanOptions,
    Rates,
    best_plan,
    changes_that_help,
    read_shape,
)
from ludic.scaling.plan import gib
from ludic.types import ConfigError

_TABLE_SHAPES = ("1.5b", "7b", "32b", "70b")
_TABLE_GPUS = (8, 64)
_TABLE_MEMORY = (80.0, 141.0)


def plan(
    model: Annotated[
        str, typer.Argument(help=f"A config.json, a folder with one, or a known shape: {', '.join(SHAPES)}.")
    ] = "",
    gpus: Annotated[int, typer.Option(help="Of all machines together.")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GiB of one GPU.")] = 141.0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean per rollout: all that the policy does not write.")] = 256,
    completion_tokens: Annotated[int, typer.Option(help="Mean per rollout: all that it writes.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="The longest sample, prompt included.")] = 4096,
    rollouts_per_update: Annotated[int, typer.Option(help="A multiple of --group-size.")] = 512,
    group_size: Annotated[int, typer.Option(help="Rollouts that share a prompt.")] = 8,
    concurrency: Annotated[int, typer.Option(help="Rollouts at a time on one copy of the model.")] = 512,
    training_tokens_per_s: Annotated[
        float | None, typer.Option(help="Measured, of this model on one GPU, without checkpointing. Else estimated.")
    ] = None,
    generation_tokens_per_s: Annotated[
        float | None, typer.Option(help="Measured, of this model on one GPU. Else estimated.")
    ] = None,
    network_gb_per_s: Annotated[
        float | None, typer.Option(help="What a GPU gets of the others, GB/s. Else 300 in a machine, 150 across.")
    ] = None,
    lora_rank: Annotated[int, typer.Option(help="Train an adapter; 0 trains all weights.")] = 0,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Of activations. Else whatever fits.")
    ] = None,
    sync_gradients: Annotated[
        Literal["last", "every"] | None, typer.Option(help="After the last micro-batch or every one. Else what fits.")
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option("--offload/--no-offload", help="To the host's memory. Else only if nothing else fits."),
    ] = None,
    micro_token_budget: Annotated[int | None, typer.Option(help="Else 16384, or less if only that fits.")] = None,
    inference_gpus: Annotated[int | None, typer.Option(help="Else what keeps both sides busy.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="GPUs of one copy that generates. Else the fastest.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Known shapes on 8 and 64 GPUs, as in docs/scaling.md.")
    ] = False,
) -> None:
    """Memory, speed and the split of GPUs between generation and training, on paper."""
    job = Job(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        max_tokens=max_tokens,
        rollouts=rollouts_per_update,
        group_size=group_size,
        concurrency=concurrency,
    )
    rates = Rates(training=training_tokens_per_s, generation=generation_tokens_per_s)
    wishes = PlanOptions(
        checkpointing=checkpointing,
        sync_gradients=sync_gradients,
        offload=offload,
        micro_token_budget=micro_token_budget,
        lora_rank=lora_rank,
        inference_gpus=inference_gpus,
        tensor_parallel=tensor_parallel,
    )
    if table:
        _refuse_model_beside_table(model, rates)
        print(memory_table(job, wishes))
        return
    if not model:
        raise ConfigError(f"Which model? Give a config.json, a folder with one, or one of {', '.join(SHAPES)}.")
    shape, hardware = read_shape(model), _hardware(gpus, gpu_memory, network_gb_per_s)
    best = best_plan(shape, job, hardware, rates=rates, wishes=wishes)
    print(report(best, rates))
    if not best.fits:
        print("\n" + what_helps(changes_that_help(shape, job, hardware, rates=rates, wishes=wishes)))
        raise typer.Exit(1)


def _hardware(gpus: int, memory: float, network_gb_per_s: float | None) -> Hardware:
    if network_gb_per_s is None:
        return Hardware(gpus=gpus, memory_gib=memory)
    speed = network_gb_per_s * 1e9
    return Hardware(gpus=gpus, memory_gib=memory, node_network=speed, network=speed)


def _refuse_model_beside_table(model: str, rates: Rates) -> None:
    if model or rates != Rates():
        raise ConfigError(
            f"--table is about {', '.join(_TABLE_SHAPES)} at estimated rates; give neither a model nor measured rates with it."
        )


# --- one plan ---


def report(plan: Plan, rates: Rates) -> str:
    """All there is to say of one plan, in lines of text."""
    shape, hardware = plan.shape, plan.hardware
    parts = [
        f"{shape.name}: {shape.params / 1e9:.2f} billion parameters in {shape.layers} layers; {_gpus(hardware.gpus, '')} of "
        f"{hardware.memory_gib:g} GiB, of which {gib(hardware.usable_bytes):.0f} are planned with",
        verdict(plan),
        "",
        *_rows("split", _split_lines(plan)),
        *_rows("settings", [settings_text(plan)]),
        "",
        *_memory_lines(plan),
    ]
    if plan.fits:
        parts += ["", *_rows("per update", _speed_lines(plan)), *_rows("rates", [_rates_text(rates)])]
    return "\n".join(parts)


def verdict(plan: Plan) -> str:
    if plan.fits:
        return "It fits."
    return " ".join(
        ["It does not fit, not even in the settings below.", *_training_problem(plan), *_serving_problem(plan)]
    )


def _training_problem(plan: Plan) -> list[str]:
    if not plan.training_excess:
        return []
    parts = {name: size for name, size, _ in _training_parts(plan)}
    largest = max(parts, key=lambda name: parts[name])
    return [
        f"Training takes {gib(plan.training.peak):.1f} GiB per GPU at its peak, and {gib(plan.hardware.usable_bytes):.1f} can be "
        f"used; most of it is {largest} ({gib(parts[largest]):.1f} GiB)."
    ]


def _serving_problem(plan: Plan) -> list[str]:
    if not plan.serving_excess:
        return []
    longest = gib(plan.job.max_tokens * plan.serving.cache_per_token)
    return [
        f"Generation misses {gib(plan.serving_excess):.1f} GiB per GPU for the weights and one sample of {plan.job.max_tokens} "
        f"tokens ({longest:.1f} GiB)."
    ]


def _rows(title: str, lines: list[str]) -> list[str]:
    return [f"{title if number == 0 else '':<12}{line}" for number, line in enumerate(lines)]


def _split_lines(plan: Plan) -> list[str]:
    if plan.is_shared:
        return ["one GPU generates and trains in turns, on the same weights (the embedded engine)"]
    copies = f"{plan.copies} cop{'y' if plan.copies == 1 else 'ies'} of the model on {plan.tensor_parallel} each"
    kind = "FSDP2" if plan.setup.ranks > 1 else "one process"
    return [f"{_gpus(plan.inference_gpus, 'inference ')} ({copies}) : {_gpus(plan.setup.ranks, 'training ')} ({kind})"]


def _gpus(number: int, kind: str) -> str:
    return f"{number} {kind}GPU{'' if number == 1 else 's'}"


def settings_text(plan: Plan) -> str:
    setup = plan.setup
    chosen = [
        f"micro_token_budget {plan.budget} ({setup.micro_batches} micro-batch{'' if setup.micro_batches == 1 else 'es'} per rank)",
        "activations checkpointed" if setup.checkpointing else "no checkpointing",
    ]
    if setup.ranks > 1 and setup.micro_batches > 1:
        chosen.append(f"sync_gradients {setup.sync_gradients}")
    if setup.lora_rank:
        chosen.append(f"LoRA of rank {setup.lora_rank}")
    if setup.offload:
        chosen.append(f"cpu_offload ({gib(plan.training.host):.0f} GiB of host memory per GPU)")
    return ", ".join(chosen)


def _training_parts(plan: Plan) -> list[tuple[str, int, str]]:
    memory = plan.training
    return [
        ("weights", memory.weights, ""),
        ("gradients", memory.gradients + memory.new_gradients, ""),
        ("optimizer", memory.optimizer, "two moments, fp32 copies of the weights"),
        ("gathered weights", memory.gathered, "root, block at hand, block ahead"),
        ("gradient buffers", memory.gradient_buffers, "on their way to other ranks"),
        ("activations", memory.activations, f"of {plan.setup.micro_tokens} tokens"),
        ("head or block", memory.working, "logits of a chunk, or gradients (and a checkpointed block) at hand"),
        ("optimizer's step", memory.step, "later, when there are no activations"),
    ]


def _memory_lines(plan: Plan) -> list[str]:
    lines = ["GiB on a training GPU"]
    for name, size, note in _training_parts(plan):
        if size:
            lines.append(f"  {name:<20}{gib(size):8.1f}   {note}".rstrip())
    lines.append(f"  {'at the peak':<20}{gib(plan.training.peak):8.1f}")
    serving, job = plan.serving, plan.job
    cached = plan.sequences * job.mean_tokens * serving.cache_per_token
    lines += ["", "GiB left for the engine on the same GPU" if plan.is_shared else "GiB on an inference GPU"]
    if not plan.is_shared:
        lines.append(f"  {'weights':<20}{gib(serving.weights):8.1f}")
        lines.append(f"  {'workspace':<20}{gib(serving.workspace):8.1f}   assumed")
    lines.append(
        f"  {'keys and values':<20}{gib(cached):8.1f}   {plan.sequences} sequences of {job.mean_tokens} tokens on average"
    )
    lines.append(f"  {'room for them':<20}{gib(serving.cache):8.1f}   {serving.tokens} tokens")
    return lines


def _speed_lines(plan: Plan) -> list[str]:
    job = plan.job
    trains = "training (bound by the network)" if plan.is_bound_by_network else "training"
    lines = [
        f"generation {plan.generation_s:.1f} s for {job.rollouts * job.completion_tokens} new tokens: "
        f"{plan.generated_per_s:.0f} tokens/s",
        f"{trains} {plan.training_s:.1f} s for {job.rollouts * job.mean_tokens} tokens: {plan.trained_per_s:.0f} tokens/s",
    ]
    if plan.is_shared:
        return [*lines, f"one after the other: {plan.updates_per_h:.1f} updates per hour"]
    busy, waiting = sorted((plan.generation_s, plan.training_s), reverse=True)
    who = "training" if plan.generation_s >= plan.training_s else "generation"
    return [
        *lines,
        f"at the same time (max_lag of 1 or more): {plan.updates_per_h:.1f} updates per hour; {who} waits "
        f"{1 - waiting / busy:.0%} of the time",
    ]


def _rates_text(rates: Rates) -> str:
    given = [
        name for name, rate in (("training", rates.training), ("generation", rates.generation)) if rate is not None
    ]
    if len(given) == 2:
        return "as you measured them"
    rest = "estimated from one H200 (docs/scaling.md)"
    return f"{given[0]} as you measured it, the rest {rest}" if given else f"{rest}; better give your own"


def what_helps(changes: list[Change]) -> str:
    if not changes:
        return "No single change helps. Take a smaller model, or GPUs with more memory."
    lines = ["What helps, each on its own:"]
    for change in changes:
        own = change.plan
        lines.append(
            f"  {change.what}: {gib(own.training.peak):.1f} GiB per training GPU, {own.updates_per_h:.1f} updates per hour "
            f"({own.inference_gpus}:{own.setup.ranks}, {settings_text(own)})"
        )
    return "\n".join(lines)


# --- the table of docs/scaling.md ---

_COLUMNS = (
    "model", "GPUs", "GiB", "split", "kept", "gathered", "buffers", "activations", "working", "peak", "serving", "settings",
    "tok/s out", "tok/s in", "updates/h",
)  # fmt: skip


def memory_table(job: Job, wishes: PlanOptions) -> str:
    """Markdown: one row per known shape, number of GPUs and size of GPU."""
    rows = [
        _table_row(best_plan(SHAPES[name], job, Hardware(gpus=gpus, memory_gib=memory), wishes=wishes))
        for name in _TABLE_SHAPES
        for gpus in _TABLE_GPUS
        for memory in _TABLE_MEMORY
    ]
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _table_row(plan: Plan) -> list[str]:
    memory, setup = plan.training, plan.setup
    chosen = [f"{plan.budget}"]
    chosen += ["ckpt"] if setup.checkpointing else []
    chosen += [setup.sync_gradients] if setup.ranks > 1 and setup.micro_batches > 1 else []
    chosen += [f"offload, {gib(memory.host):.0f} on the host"] if setup.offload else []
    sizes = (
        memory.kept,
        memory.gathered,
        memory.gradient_buffers,
        memory.activations,
        max(memory.head, memory.backward),
    )
    return [
        plan.shape.name,
        str(plan.hardware.gpus),
        f"{plan.hardware.memory_gib:g}",
        f"{plan.copies}×{plan.tensor_parallel} : {setup.ranks}",
        *(f"{gib(size):.1f}" for size in sizes),
        f"{gib(memory.peak):.1f}" + ("" if plan.fits else " (does not fit)"),
        f"{gib(plan.serving_peak):.1f}",
        ", ".join(chosen),
        f"{plan.generated_per_s:.0f}",
        f"{plan.trained_per_s:.0f}",
        f"{plan.updates_per_h:.0f}",
    ]
