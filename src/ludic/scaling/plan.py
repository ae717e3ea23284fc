"""How to divide GPUs between generation and training so that neither waits long, in settings that fit.

Every division and every setting that was left open is tried; the fastest that fits is the plan.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ludic.scaling.memory import (
    GIB,
    ServingMemory,
    TrainingMemory,
    TrainingSetup,
    cache_bytes_per_token,
    serving_memory,
    training_memory,
)
from ludic.scaling.shapes import ModelShape
from ludic.scaling.throughput import (
    ACHIEVED_FLOPS,
    Hardware,
    Rates,
    communication_s,
    decode_s,
    forward_flops,
    offload_s,
    training_rate,
)
from ludic.types import ConfigError

Sync: TypeAlias = Literal["last", "every"]
LARGEST_BUDGET = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one update takes, in means over rollouts."""

    prompt_tokens: int = 256
    """Everything in a sample that the policy did not write."""
    completion_tokens: int = 1024
    """Everything that it did."""
    max_tokens: int = 4096
    """The longest sample, prompt included."""
    rollouts: int = 512
    """Per update."""
    group_size: int = 8
    """Rollouts that share a prompt, which is then computed once."""
    concurrency: int = 512
    """Rollouts at a time on one copy of the model, at most."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "rollouts", "group_size", "concurrency"):
            value = {
                "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "rollouts": self.rollouts, "group_size": self.group_size, "concurrency": self.concurrency,
            }[name]  # fmt: skip
            if value < 1:
                raise ConfigError(f"{name}={value}; it must be at least 1.")
        if self.rollouts % self.group_size:
            raise ConfigError(
                f"rollouts={self.rollouts} per update are not whole groups of {self.group_size}; choose a multiple."
            )
        if self.max_tokens < self.mean_tokens:
            raise ConfigError(
                f"max_tokens={self.max_tokens}, but a rollout has {self.mean_tokens} tokens on average (prompt and completion)."
            )

    @property
    def mean_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def action_share(self) -> float:
        return self.completion_tokens / self.mean_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What the user has decided; None leaves it to the planner."""

    checkpointing: bool | None = None
    sync_gradients: Sync | None = None
    offload: bool | None = None
    micro_token_budget: int | None = None
    lora_rank: int = 0
    inference_gpus: int | None = None
    tensor_parallel: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One division of the GPUs, and what comes of it."""

    shape: ModelShape
    job: Job
    hardware: Hardware
    setup: TrainingSetup
    budget: int
    """`micro_token_budget`; a rank's share of an update may be less."""
    copies: int
    """Of the model, for generation."""
    tensor_parallel: int
    """GPUs of each copy."""
    is_shared: bool
    """One GPU does both in turns, on the same weights."""
    training: TrainingMemory
    serving: ServingMemory
    sequences: int
    """At a time on each copy."""
    generation_s: float
    training_s: float
    """Per update."""
    is_bound_by_network: bool
    """Training waits for weights and gradients more than it computes."""

    @property
    def inference_gpus(self) -> int:
        return self.copies * self.tensor_parallel

    @property
    def serving_peak(self) -> int:
        used = self.sequences * self.job.mean_tokens * self.serving.cache_per_token
        return self.serving.weights + self.serving.workspace + used

    @property
    def training_excess(self) -> int:
        """Bytes over what a training GPU can give."""
        return max(0, self.training.peak - self.hardware.usable_bytes)

    @property
    def serving_excess(self) -> int:
        """Bytes missing for weights and one sequence of the longest kind."""
        return max(0, self.job.max_tokens * self.serving.cache_per_token - self.serving.left)

    @property
    def fits(self) -> bool:
        return not self.training_excess and not self.serving_excess

    @property
    def update_s(self) -> float:
        """Both at the same time, or in turns on one GPU."""
        both = self.generation_s, self.training_s
        return sum(both) if self.is_shared else max(both)

    @property
    def updates_per_h(self) -> float:
        return 3600 / self.update_s

    @property
    def generated_per_s(self) -> float:
        """New tokens per second while generating, all copies together."""
        return self.job.rollouts * self.job.completion_tokens / self.generation_s

    @property
    def trained_per_s(self) -> float:
        return self.job.rollouts * self.job.mean_tokens / self.training_s


def best_plan(
    shape: ModelShape, job: Job, hardware: Hardware, *, rates: Rates | None = None, wishes: PlanOptions | None = None
) -> Plan:
    """The fastest that fits; if none does, the one that misses by least."""
    rates, wishes = rates or Rates(), wishes or PlanOptions()
    _check(job, hardware, wishes)
    plans: list[Plan] = []
    # Offloading slows everything down by an amount that nobody has measured here: only where nothing else helps.
    for offload in (False, True) if wishes.offload is None else (wishes.offload,):
        plans += _plans(shape, job, hardware, rates, replace(wishes, offload=offload))
        fitting = [plan for plan in plans if plan.fits]
        if fitting:
            return min(fitting, key=lambda plan: plan.update_s)
    if not plans:
        raise ConfigError(
            f"There is no way to divide {hardware.gpus} GPUs with inference_gpus={wishes.inference_gpus}, "
            f"tensor_parallel={wishes.tensor_parallel} and offload={wishes.offload} for {shape.heads} heads: GPUs of one copy "
            "divide its heads and are on one machine, and offloading takes two or more training GPUs."
        )
    return min(plans, key=lambda plan: (plan.training_excess + plan.serving_excess, plan.update_s))


def _check(job: Job, hardware: Hardware, wishes: PlanOptions) -> None:
    budget, inference = wishes.micro_token_budget, wishes.inference_gpus
    if budget is not None and budget < job.max_tokens:
        raise ConfigError(
            f"micro_token_budget={budget} is less than the longest sample of {job.max_tokens} tokens; raise it, or lower "
            "max_tokens."
        )
    if inference is not None and not 1 <= inference < hardware.gpus:
        raise ConfigError(
            f"inference_gpus={inference} of {hardware.gpus}: at least one GPU generates, and at least one trains."
        )
    if wishes.tensor_parallel is not None and wishes.tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel={wishes.tensor_parallel}; it is at least 1.")


def _plans(shape: ModelShape, job: Job, hardware: Hardware, rates: Rates, wishes: PlanOptions) -> list[Plan]:
    return [
        _plan(shape, job, hardware, rates, setup, budget, copies, size)
        for copies, size in divisions(shape, hardware, wishes)
        for setup, budget in _setups(job, _num_trainers(hardware, copies, size), wishes)
    ]


def divisions(shape: ModelShape, hardware: Hardware, wishes: PlanOptions) -> Iterator[tuple[int, int]]:
    """(copies of the model for generation, GPUs of each). One GPU in all does both."""
    sizes = [1, 2, 4, 8] if wishes.tensor_parallel is None else [wishes.tensor_parallel]
    for size in (size for size in sizes if shape.heads % size == 0 and size <= hardware.gpus_per_node):
        if hardware.gpus == 1:
            if size == 1:
                yield 1, 1
            continue
        for copies in range(1, (hardware.gpus - 1) // size + 1):
            if wishes.inference_gpus in (None, copies * size):
                yield copies, size


def _num_trainers(hardware: Hardware, copies: int, size: int) -> int:
    return 1 if hardware.gpus == 1 else hardware.gpus - copies * size


def _setups(job: Job, ranks: int, wishes: PlanOptions) -> Iterator[tuple[TrainingSetup, int]]:
    """Every setting that was left open, the simplest first."""
    if wishes.offload and ranks == 1:
        return
    share = math.ceil(job.rollouts * job.mean_tokens / ranks)
    for budget in _budgets(job, wishes):
        micro_batches = math.ceil(share / budget)
        for checkpointing in (False, True) if wishes.checkpointing is None else (wishes.checkpointing,):
            for sync in _syncs(wishes, matters=ranks > 1 and micro_batches > 1):
                setup = TrainingSetup(
                    ranks=ranks,
                    # A full micro-batch, since samples do not divide evenly; but no more than there is.
                    micro_tokens=min(budget, max(share, job.max_tokens)),
                    micro_batches=micro_batches,
                    action_share=job.action_share,
                    checkpointing=checkpointing,
                    sync_gradients=sync,
                    offload=bool(wishes.offload),
                    lora_rank=wishes.lora_rank,
                )
                yield setup, budget


def _syncs(wishes: PlanOptions, *, matters: bool) -> tuple[Sync, ...]:
    if wishes.sync_gradients is not None:
        return (wishes.sync_gradients,)
    return ("last", "every") if matters else ("last",)


def _budgets(job: Job, wishes: PlanOptions) -> list[int]:
    if wishes.micro_token_budget is not None:
        return [wishes.micro_token_budget]
    budgets = [max(LARGEST_BUDGET, job.max_tokens)]
    while budgets[-1] // 2 >= job.max_tokens:
        budgets.append(budgets[-1] // 2)
    return budgets


def _plan(
    shape: ModelShape,
    job: Job,
    hardware: Hardware,
    rates: Rates,
    setup: TrainingSetup,
    budget: int,
    copies: int,
    size: int,
) -> Plan:
    is_shared = hardware.gpus == 1
    training = training_memory(shape, setup)
    if is_shared:
        # The engine serves the weights that are trained: it only needs a cache, beside what training takes at its peak.
        left = hardware.usable_bytes - training.peak
        serving = ServingMemory(weights=0, workspace=0, left=left, cache_per_token=cache_bytes_per_token(shape))
    else:
        serving = serving_memory(shape, usable=hardware.usable_bytes, tensor_parallel=size)
    sequences = min(job.concurrency, serving.tokens // job.mean_tokens, math.ceil(job.rollouts / copies))
    computing = _computing_s(shape, job, hardware, rates, setup)
    talking = communication_s(shape, hardware, setup)
    return Plan(
        shape=shape,
        job=job,
        hardware=hardware,
        setup=setup,
        budget=budget,
        copies=copies,
        tensor_parallel=size,
        is_shared=is_shared,
        training=training,
        serving=serving,
        sequences=sequences,
        generation_s=_generation_s(shape, job, hardware, rates, copies, size, max(1, sequences)),
        training_s=max(computing, talking) + offload_s(shape, setup),
        is_bound_by_network=talking > computing,
    )


def _computing_s(shape: ModelShape, job: Job, hardware: Hardware, rates: Rates, setup: TrainingSetup) -> float:
    rate = training_rate(shape, hardware, rates, length=job.mean_tokens, action_share=job.action_share, setup=setup)
    return job.rollouts * job.mean_tokens / (setup.ranks * rate)


def _generation_s(
    shape: ModelShape, job: Job, hardware: Hardware, rates: Rates, copies: int, size: int, sequences: int
) -> float:
    """Prompts once per group, then token by token."""
    num_new = job.rollouts * job.completion_tokens
    if rates.generation is not None:
        return num_new / (rates.generation * copies * size)
    context = job.prompt_tokens + job.completion_tokens / 2
    step = decode_s(shape, hardware, sequences=sequences, context=context, tensor_parallel=size)
    speed = ACHIEVED_FLOPS * hardware.flops / Hardware(gpus=1).flops
    prompts = job.rollouts / job.group_size * job.prompt_tokens * forward_flops(shape, job.prompt_tokens)
    return num_new / (copies * sequences / step) + prompts / (speed * copies * size)


def gib(num_bytes: float) -> float:
    return num_bytes / GIB
