"""What a measurement was made on: hardware, versions, commit; and where a GPU's time goes."""

import importlib.metadata
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
KINDS = (
    ("attention", ("_decode_kernel", "_merge_kernel", "_shared_kernel", "flash", "fmha", "attention", "attn")),
    ("products", ("gemm", "nvjet", "cutlass", "gemv", "splitk", "_row_product_kernel", "cublas")),
    ("sampling", ("_sum_chunks_kernel", "_draw_kernel")),
    ("norms, rotation, gate", ("norm", "rotate", "silu")),
    ("copies", ("memcpy", "memset", "copy", "index", "gather", "scatter", "cat")),
)
"""Kinds of kernels, and parts of their names; the first that fits counts."""


def hardware() -> str:
    if ON_GPU:
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit of this tree, with + if files differ. Where only a copy of it is, LUDIC_COMMIT says it."""
    if "LUDIC_COMMIT" in os.environ:
        return os.environ["LUDIC_COMMIT"]
    root = Path(__file__).parents[1]
    try:
        sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if sha.returncode:
        return "unknown"
    return sha.stdout.strip() + ("+" if changed.stdout.strip() else "")


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described() -> str:
    """One line for the top of a table."""
    found = ", ".join(f"{name} {version}" for name, version in versions("transformers").items())
    return f"{hardware()}, {found}, commit {commit()}"


def show_kernel_times(run: Callable[[], Any]) -> None:
    """Print how long `run` takes on the clock, and how long the GPU computes kernels of each kind. Profiling slows the host."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        kind = next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")
        by_kind[kind] += event.self_device_time_total / 1e6
        by_name[event.name[:90]] += event.self_device_time_total / 1e6
    busy = sum(by_kind.values())
    print(f"  {seconds:.3f} s with the profiler, of which kernels {busy:.3f} s ({busy / seconds:.0%})", flush=True)
    for kind, spent in by_kind.most_common():
        print(f"    {spent:8.3f} s  {spent / busy:5.1%}  {kind}")
    for name, spent in by_name.most_common(10):
        print(f"      {spent:8.3f} s  {name}", flush=True)
