"""Sandboxed runs of a trivial program per second, against the same program as a plain subprocess.

Each backend has as many workers as there are cores; the plain line below them is `subprocess.run([python, "-c", …])` from
as many threads, the cost of a bare Python process. The ratio is plain / sandboxed. On a shared machine, compare the CPU
time per run (of harness, launcher and program together).

    .venv/bin/python benchmarks/sandbox.py [--runs 200] [--workers 2] [--podman-image IMAGE [--podman-runtime runc]]
"""

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from ludic.sandbox import (
    BaseSandboxPool,
    BubblewrapSandboxPool,
    PodmanConfig,
    PodmanSandboxPool,
    SubprocessSandboxPool,
)
from ludic.sandbox.bubblewrap import find_interpreter

PROGRAM = "print(int(input()) + 1)"


def plain(num_runs: int, num_workers: int) -> float:
    """Seconds for the program without any of our parts."""
    python = find_interpreter().path

    def one(number: int) -> None:
        done = subprocess.run([python, "-c", PROGRAM], input=f"{number}\n", capture_output=True, text=True, check=True)
        assert done.stdout == f"{number + 1}\n", done

    with ThreadPoolExecutor(num_workers) as threads:
        started = time.perf_counter()
        list(threads.map(one, range(num_runs)))
        return time.perf_counter() - started


async def pooled(pool: BaseSandboxPool, num_runs: int, num_workers: int) -> tuple[float, list[float]]:
    """Seconds for all runs, and the milliseconds from checkout to result of each."""
    numbers, latencies = iter(range(num_runs)), []

    async def worker() -> None:
        for number in numbers:
            sandbox = await pool.checkout()
            asked = time.perf_counter()
            result = await sandbox.execute(PROGRAM, stdin=f"{number}\n")
            latencies.append((time.perf_counter() - asked) * 1000)
            await pool.release(sandbox)
            assert result.stdout == f"{number + 1}\n", result

    async with pool:
        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(num_workers)))
        return time.perf_counter() - started, latencies


def cpu_seconds() -> float:
    """Of this process and its children so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=200)
    arguments.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments.add_argument("--podman-image", help="also measure podman with this image, which has a python3")
    arguments.add_argument("--podman-runtime", help="its --runtime, where the default one does not work")
    options = arguments.parse_args()
    num_runs, num_workers = options.runs, options.workers
    print(f"{'':28} {'runs/s':>8} {'median ms':>10} {'p95 ms':>8} {'CPU ms/run':>11} {'plain/this':>11}")
    before = cpu_seconds()
    base = num_runs / plain(num_runs, num_workers)
    cpu = (cpu_seconds() - before) / num_runs * 1000
    print(f"{'subprocess.run, no pool':28} {base:8.1f} {'—':>10} {'—':>8} {cpu:11.1f} {1.0:11.2f}")
    makers = {
        "subprocess backend": lambda: SubprocessSandboxPool(n_workers=num_workers),
        "bubblewrap": lambda: BubblewrapSandboxPool(n_workers=num_workers),
        "bubblewrap, twice the pool": lambda: BubblewrapSandboxPool(n_workers=2 * num_workers),
    }
    if options.podman_image:
        runtime = ("--runtime", options.podman_runtime) if options.podman_runtime else ()
        config = PodmanConfig(base_image=options.podman_image, extra_args=runtime)
        makers["podman"] = lambda: PodmanSandboxPool(config, n_workers=num_workers)
    for name, make in makers.items():
        before = cpu_seconds()
        seconds, latencies = asyncio.run(pooled(make(), num_runs, num_workers))
        cpu, rate = (cpu_seconds() - before) / num_runs * 1000, num_runs / seconds
        p95 = statistics.quantiles(latencies, n=20)[-1]
        print(f"{name:28} {rate:8.1f} {statistics.median(latencies):10.1f} {p95:8.1f} {cpu:11.1f} {base / rate:11.2f}")


if __name__ == "__main__":
    main()
