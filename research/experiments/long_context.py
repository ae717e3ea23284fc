"""Long samples on one GPU: tokens per second and peak memory of a training step, for each way to hold activations.

A step is gradients of the clipped GRPO loss and one optimizer step, bf16 weights with fp32 copies, random weights of the shape. All
tokens are one sample (`--samples` cuts them into several). Modes:

- plain, recompute, offload, recompute+offload: transformers' own modules;
- fused, fused+recompute, fused+offload, fused+recompute+offload: the pass of ludic_gpu.llama, on a GPU in bf16.

Each mode runs in a separate process. A mode that runs out of memory prints so, and the others go on. `agree` is the largest
difference of a gradient from the first mode that ran, relative to that gradient's largest entry, over four weights of the first
and last layers.

    PYTHONPATH=src:benchmarks python3 research/experiments/long_context.py --shape 1.5b --tokens 32768            # on a GPU
    PYTHONPATH=src:benchmarks python3 research/experiments/long_context.py --shape 1.5b --tokens 131072 --modes fused+recompute+offload
    PYTHONPATH=src:benchmarks python3 research/experiments/long_context.py --shape tiny --tokens 512              # on a CPU
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine import make, qwen, qwen_7b, smollm2, tiny
from training import samples

from ludic.models.execution import recompute_activations
from ludic.training.config import TrainerConfig
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.optimizer import make_adamw
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss

ON_GPU = torch.cuda.is_available()
SHAPES: dict[str, Callable[[], Any]] = {"tiny": tiny, "135m": smollm2, "1.5b": qwen, "7b": qwen_7b}
MODULES = ["plain", "recompute", "recompute+offload"]
FUSED = ["fused", "fused+recompute", "fused+offload", "fused+recompute+offload"]
MODES = [*MODULES, "offload", *FUSED]
COMPARED = 4
"""Tensors whose gradients are compared between modes: of the first and the last layers."""


def run_mode(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One mode in this process."""
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    model = make(SHAPES[options.shape], device, dtype).train()
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, options.tokens)
    parts = set(mode.split("+"))
    if "recompute" in parts:
        recompute_activations(model)
    policy = TrainedPolicy(model, fused="fused" in parts, offload="offload" in parts)
    if "fused" in parts and not policy.is_fused:
        return {"error": "the fused pass does not serve this model here (it needs a GPU and bf16)"}
    optimizer = make_adamw(list(model.parameters()), [], TrainerConfig(lr=1e-6))
    length = options.tokens // options.samples
    items = samples([length] * options.samples, model.config.vocab_size, options.prompt_share)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds, kept = [], {}
    for number in range(options.repeat + 1):
        _sync()
        started = time.perf_counter()
        accumulate_gradients(policy, TokenClippedSurrogateLoss(), items, micro_token_budget=options.tokens).means()
        _sync()
        in_gradients = time.perf_counter() - started
        if number == 0:
            kept = _some_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _sync()
        seconds.append((time.perf_counter() - started, in_gradients))
    if options.gradients:
        torch.save(kept, options.gradients)
    step, in_gradients = min(seconds[1:])
    host = 0 if policy.forward_pass.offload is None else policy.forward_pass.offload.host_bytes
    return {
        "step_s": step,
        "gradient_s": in_gradients,
        "tokens_per_s": options.tokens / step,
        "peak_gb": _peak_bytes() / 1e9,
        "host_gb": host / 1e9,
    }


def _some_gradients(model: Any) -> dict[str, torch.Tensor]:
    names = [name for name, p in model.named_parameters() if p.grad is not None and ".layers." in name and p.dim() == 2]
    chosen = [*names[: COMPARED // 2], *names[-COMPARED // 2 :]]
    return {name: model.get_parameter(name).grad.float().cpu().clone() for name in chosen}


def _sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _peak_bytes() -> int:
    if ON_GPU:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_own_process(mode: str, arguments: list[str], gradients: Path, timeout_s: float) -> dict[str, Any]:
    """The result, or {"error": …}."""
    command = [sys.executable, __file__, *arguments, "--mode", mode, "--gradients", str(gradients)]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    print(done.stderr[-3000:], file=sys.stderr)
    return {"error": f"exit status {done.returncode}: {last[:200]}"}


def difference(first: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
    """The largest, relative to the largest entry of each gradient."""
    return max(float((own[name] - grad).abs().max() / grad.abs().max()) for name, grad in first.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b" if ON_GPU else "tiny")
    parser.add_argument("--tokens", type=int, default=32_768 if ON_GPU else 512)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--prompt-share", type=float, default=0.3, help="tokens that are not trained on")
    parser.add_argument("--repeat", type=int, default=2, help="timed steps after one that is not")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODULES, *FUSED] if ON_GPU else MODES[:4])
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one mode")
    parser.add_argument("--mode", choices=MODES, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode is not None:
        try:
            print(json.dumps(run_mode(options.mode, options)))
        except torch.OutOfMemoryError as error:
            print(json.dumps({"error": f"out of memory: {str(error).splitlines()[0][:160]}"}))
        return
    name = torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"torch {torch.__version__}, {name}; {options.shape} shape, {options.tokens:,} tokens, {options.samples} samples"
    )
    print(f"{'mode':26} {'tok/s':>9} {'step s':>8} {'gradient s':>11} {'peak GB':>9} {'host GB':>9}  agree", flush=True)
    first: dict[str, torch.Tensor] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            path = Path(folder) / f"{mode}.pt"
            shared = ["--shape", options.shape, "--tokens", str(options.tokens), "--samples", str(options.samples)]
            shared += ["--prompt-share", str(options.prompt_share), "--repeat", str(options.repeat)]
            found = in_own_process(mode, shared, path, options.timeout_s)
            if "error" in found:
                print(f"{mode:26} {found['error']}", flush=True)
                continue
            own = torch.load(path)
            first = own if first is None else first
            print(
                f"{mode:26} {found['tokens_per_s']:9,.0f} {found['step_s']:8.2f} {found['gradient_s']:11.2f} "
                f"{found['peak_gb']:9.2f} {found['host_gb']:9.2f}  {difference(first, own):.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
