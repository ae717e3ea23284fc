"""What to change when nothing fits: each change is tried on its own, then the plan made anew."""

from dataclasses import dataclass, replace

from ludic.scaling.plan import Job, Plan, PlanOptions, best_plan
from ludic.scaling.shapes import ModelShape
from ludic.scaling.throughput import Hardware, Rates

MOST_GPUS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One thing done differently."""

    what: str
    plan: Plan


def changes_that_help(
    shape: ModelShape, job: Job, hardware: Hardware, *, rates: Rates | None = None, wishes: PlanOptions | None = None
) -> list[Change]:
    """Those after which everything fits, the least intrusive first."""
    wishes = wishes or PlanOptions()
    tried = [
        Change(what=what, plan=best_plan(shape, own_job, own_hardware, rates=rates, wishes=own_wishes))
        for what, own_job, own_hardware, own_wishes in _changes(job, hardware, wishes)
    ]
    more = _more_gpus(shape, job, hardware, rates, wishes)
    return [change for change in (*tried, *more) if change.plan.fits]


def _changes(job: Job, hardware: Hardware, wishes: PlanOptions) -> list[tuple[str, Job, Hardware, PlanOptions]]:
    found: list[tuple[str, Job, Hardware, PlanOptions]] = []
    if wishes.sync_gradients == "last":
        found.append(("sum gradients after every micro-batch", job, hardware, replace(wishes, sync_gradients=None)))
    if wishes.checkpointing is False:
        found.append(("checkpoint activations", job, hardware, replace(wishes, checkpointing=None)))
    if wishes.micro_token_budget is not None and wishes.micro_token_budget > job.max_tokens:
        found.append(("a smaller micro_token_budget", job, hardware, replace(wishes, micro_token_budget=None)))
    if wishes.inference_gpus is not None:
        found.append(("another split of the GPUs", job, hardware, replace(wishes, inference_gpus=None)))
    if wishes.offload is False and hardware.gpus > 2:
        found.append(("offload to the host's memory", job, hardware, replace(wishes, offload=None)))
    if not wishes.lora_rank:
        found.append(("train a LoRA adapter of rank 16", job, hardware, replace(wishes, lora_rank=16)))
    shorter = max(job.mean_tokens, job.max_tokens // 2)
    if shorter < job.max_tokens:
        budget = None if wishes.micro_token_budget is None else shorter
        less = replace(wishes, micro_token_budget=budget)
        found.append((f"samples of at most {shorter} tokens", replace(job, max_tokens=shorter), hardware, less))
    return found


def _more_gpus(
    shape: ModelShape, job: Job, hardware: Hardware, rates: Rates | None, wishes: PlanOptions
) -> list[Change]:
    """The first doubling that fits."""
    gpus = 2 * hardware.gpus
    while gpus <= MOST_GPUS:
        plan = best_plan(shape, job, replace(hardware, gpus=gpus), rates=rates, wishes=wishes)
        if plan.fits:
            return [Change(what=f"{gpus} GPUs", plan=plan)]
        gpus *= 2
    return []
