"""The training step against plain baselines, in one run.

- packed against padded, on a skewed length distribution (tokens per second, and how much of the padded batch is padding);
- log-probs in chunks against full logits (peak memory, and equality of gradients);
- a step with and without the check for finite weights;
- a step with and without the record of its tokens (`--save-tokens`);
- on a GPU: trained tokens per second of two model shapes: own modules, compiled layers, the fused pass; with and without LoRA;
- a whole GRPO step, phase by phase (grpo_step.py has the flags); on a CPU only if asked for.

    .venv/bin/python benchmarks/training.py                 # what this machine has
    .venv/bin/python benchmarks/training.py --only speed
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import make, qwen, smollm2, tiny
from machine import ON_GPU, described

from ludic.models.execution import compile_layers
from ludic.models.head import Head, chosen_logps
from ludic.models.weights import FiniteCheck
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.learner.token_recorder import TokenRecorder
from ludic.training.losses import TokenClippedSurrogateLoss
from ludic.types import ActorTokenLogps, SampleAttachments, SAWItem


def sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def samples(lengths: list[int], vocab: int, prompt_share: float = 0.3) -> list[SAWItem]:
    rng = np.random.default_rng(0)
    items = []
    for length in lengths:
        num_prompt = max(1, int(length * prompt_share))
        mask = np.arange(length) >= num_prompt
        logps = ActorTokenLogps(np.full(length - num_prompt, -np.log(vocab), dtype=np.float32))
        ids = rng.integers(0, vocab, size=length).astype(np.int32)
        items.append(SAWItem(ids, None, mask, float(rng.normal()), {}, SampleAttachments(actor_logps=logps)))
    return items


def skewed_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """Many short, few long: log-normal, cut at both ends."""
    rng = np.random.default_rng(1)
    drawn = np.exp(rng.normal(np.log(shortest * 3), 0.8, size=count))
    return [int(n) for n in np.clip(drawn, shortest, longest)]


def step_seconds(
    model: Any,
    items: list[SAWItem],
    *,
    packed: bool,
    budget: int,
    repeat: int = 3,
    way: str = "fused",
    checked: bool = False,
) -> float:
    policy = TrainedPolicy(model, packed=packed, fused=way == "fused")
    if way == "compiled":
        compile_layers(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=ON_GPU, foreach=not ON_GPU)
    seconds = []
    for _ in range(repeat + 2):
        sync()
        started = time.perf_counter()
        sums = accumulate_gradients(policy, TokenClippedSurrogateLoss(), items, micro_token_budget=budget)
        float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        if checked:
            sums.add_max({"suspects": FiniteCheck(model.named_parameters()).num_suspects})
        sums.means()
        optimizer.zero_grad()
        sync()
        seconds.append(time.perf_counter() - started)
    return min(seconds[2:])


def packed_against_padded() -> None:
    build, count, shortest, longest, budget = (smollm2, 512, 64, 2048, 16_384) if ON_GPU else (tiny, 64, 16, 512, 2048)
    model = make(build, "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32).train()
    items = samples(skewed_lengths(count, shortest, longest), model.config.vocab_size)
    total = sum(len(item.input_ids) for item in items)
    # The baseline pads samples in order of arrival; Ludic sorts by length even when it pads.
    padded = step_seconds(model, items, packed=False, budget=budget)
    packed = step_seconds(model, items, packed=True, budget=budget)
    naive = sum(8 * max(len(i.input_ids) for i in items[k : k + 8]) for k in range(0, len(items), 8))
    print(
        f"packed against padded, {count} samples of {shortest}–{longest} tokens ({total:,} in all):\n"
        f"  padded (sorted by length)  {total / padded:12,.0f} tok/s\n"
        f"  packed                     {total / packed:12,.0f} tok/s   {padded / packed:.2f}x, no padding\n"
        f"  (batches of 8 in arrival order would be {1 - total / naive:.0%} padding)"
    )


def finite_check() -> None:
    """The trainer's check: after the step, read together with its other numbers."""
    name, build, lengths = ("Qwen2.5-1.5B", qwen, [1024] * 16) if ON_GPU else ("SmolLM2-135M", smollm2, [128] * 2)
    model = make(build, "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32).train()
    items = samples(lengths, model.config.vocab_size)
    without, ours = (
        step_seconds(model, items, packed=True, budget=16_384, checked=checked) for checked in (False, True)
    )
    started = time.perf_counter()
    for _ in range(5):
        float(FiniteCheck(model.named_parameters()).num_suspects)
    alone = (time.perf_counter() - started) / 5
    print(
        f"are the weights finite, {name} shape, {sum(lengths):,} tokens, all weights trained:\n"
        f"  step without the check  {without * 1e3:9.1f} ms\n"
        f"  step with it            {ours * 1e3:9.1f} ms   {ours / without:.3f}x; the check alone {alone * 1e3:.1f} ms, "
        f"{alone / without:.2%} of a step"
    )


def token_record() -> None:
    """`TokenRecorder` on and off, alternating. On a CPU in CPU time, its thread included, which other programs disturb less."""
    cases = [("small", tiny, [256] * 8)]
    cases += [("Qwen2.5-1.5B", qwen, [1024] * 16)] if ON_GPU else []
    for name, build, lengths in cases:
        model = make(build, "cuda" if ON_GPU else "cpu", torch.bfloat16 if ON_GPU else torch.float32).train()
        items = samples(lengths, model.config.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            recorder = TokenRecorder(folder)
            times: dict[bool, list[float]] = {False: [], True: []}
            for step in range(1, 2 * RECORD_REPEATS + 3):
                is_on = step % 2 == 0
                seconds = _recorded_step(model, items, recorder if is_on else None, step)
                if step > 2:
                    times[is_on].append(seconds)
            recorder.close()
            size = max(path.stat().st_size for path in Path(folder).iterdir())
        off, on = (float(np.median(times[which])) for which in (False, True))
        best = min(times[True]) / min(times[False])
        num_tokens = sum(item.num_action_tokens for item in items)
        print(
            f"record of {num_tokens:,} action tokens, {name} shape, {RECORD_REPEATS} steps each, alternating"
            f"{'' if ON_GPU else ', CPU time'}:\n"
            f"  without  {off * 1e3:9.1f} ms\n"
            f"  with it  {on * 1e3:9.1f} ms   {on / off:.3f}x (medians), {best:.3f}x (fastest); {size / num_tokens:.1f} "
            f"bytes per token; {recorder.num_dropped} dropped"
        )


RECORD_REPEATS = 15


def _recorded_step(model: Any, items: list[SAWItem], recorder: TokenRecorder | None, step: int) -> float:
    policy, clock = TrainedPolicy(model), time.perf_counter if ON_GPU else time.process_time
    sync()
    started = clock()
    record = None if recorder is None else recorder.start(step)
    sums = accumulate_gradients(
        policy, TokenClippedSurrogateLoss(), items, micro_token_budget=16_384, watch_entropy=True, record=record
    )
    sums.means()
    if recorder is not None and record is not None:
        recorder.write(step, record)
        if not ON_GPU:
            recorder.flush()
    model.zero_grad(set_to_none=True)
    sync()
    return clock() - started


# --- memory ---


def head_memory(way: str) -> None:
    """Runs in a separate process: peak memory of the last layer's forward and backward."""
    tokens, vocab, width = (16_384, 151_936, 1536) if ON_GPU else (1024, 151_936, 64)
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, width, device=device, dtype=dtype) / 10).requires_grad_()
    weight = (torch.randn(vocab, width, device=device, dtype=dtype) / 10).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    before = _peak_bytes(reset=True)
    if way == "chunks":
        logps, _ = chosen_logps(hidden, Head(weight), targets)
    else:
        logits = (hidden @ weight.t()).float()
        logps = logits.log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]
    (logps * torch.linspace(-1, 1, tokens, device=device)).sum().backward()
    sync()
    assert hidden.grad is not None and weight.grad is not None
    sums = float(hidden.grad.double().abs().sum()), float(weight.grad.double().abs().sum())
    print(f"{_peak_bytes() - before} {sums[0]} {sums[1]}")


def _peak_bytes(reset: bool = False) -> int:
    if ON_GPU:
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def chunks_against_full_logits() -> None:
    results = {}
    for way in ("full", "chunks"):
        out = subprocess.run(
            [sys.executable, __file__, "--head", way], capture_output=True, text=True, check=True
        ).stdout.split()
        results[way] = int(out[0]), float(out[1]), float(out[2])
    (full, full_h, full_w), (chunked, chunk_h, chunk_w) = results["full"], results["chunks"]
    tokens = 16_384 if ON_GPU else 1024
    print(
        f"last layer, vocabulary 151,936, {tokens:,} tokens: peak memory over what is there before\n"
        f"  full logits  {full / 2**30:6.2f} GiB\n"
        f"  in chunks    {chunked / 2**30:6.2f} GiB   {full / max(chunked, 1):.1f}x less; "
        f"|gradients| differ by {abs(full_h - chunk_h) / full_h:.1e} and {abs(full_w - chunk_w) / full_w:.1e}"
    )


# --- speed on a GPU ---


SHAPES = {"135m": ("SmolLM2-135M shape", smollm2), "1.5b": ("Qwen2.5-1.5B shape", qwen)}


def trained_tokens_per_second(lora_rank: int, shapes: list[str]) -> None:
    """Of all weights, or with a rank of an adapter on every layer (its MFU is not known: frozen weights have no gradient)."""
    peak = 989e12  # bf16 dense, H100/H200
    for name, build in (SHAPES[shape] for shape in shapes):
        for way in ("modules", "compiled", "fused"):
            model = make(build, "cuda", torch.bfloat16).train()
            if lora_rank:
                from peft import LoraConfig, get_peft_model

                model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear")).train()
            items = samples([1024] * 16, model.config.vocab_size)
            seconds = step_seconds(model, items, packed=True, budget=16_384, way=way)
            num_params = sum(p.numel() for p in model.parameters())
            rate = 16_384 / seconds
            share = f"LoRA of rank {lora_rank}" if lora_rank else f"MFU {6 * num_params * rate / peak:.2f}"
            print(
                f"{name:22} bf16, 16 × 1024 tokens, {way:8}: {rate:10,.0f} tok/s, {share}, "
                f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
                flush=True,
            )
            del model
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--only", choices=["packing", "memory", "finite", "record", "speed", "lora", "grpo"], default=None
    )
    arguments.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="of speed and lora")
    arguments.add_argument("--head", choices=["full", "chunks"], default=None, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.head:
        head_memory(options.head)
        return
    print(described())
    if options.only in (None, "memory"):
        chunks_against_full_logits()
    if options.only in (None, "packing"):
        packed_against_padded()
    if options.only in (None, "finite"):
        finite_check()
    if options.only in (None, "record"):
        token_record()
    if ON_GPU and options.only in (None, "speed"):
        trained_tokens_per_second(0, options.shape)
    if ON_GPU and options.only in (None, "lora"):
        trained_tokens_per_second(16, options.shape)
    if options.only == "grpo" or (ON_GPU and options.only is None):
        import grpo_step

        grpo_step.main(["--trl", "off"])


if __name__ == "__main__":
    main()
