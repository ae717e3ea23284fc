"""Sandboxed runs of a trivial program per second, against the same program as a plain subprocess.

Each backend has as many workers as there are cores; the plain line below them is `subprocess.run([python, "-c", …])` from
as many threads, the cost of a bare Python process. The ratio is plain / sandboxed. On a shared machine, compare the CPU
time per run (of harness, launcher and program together).

The remote lines use a `ludic sandbox-server` on this machine, over loopback; it has as many bubblewrap sandboxes as there are
cores.

    .venv/bin/python benchmarks/sandbox.py [--runs 200] [--workers 2] [--podman-image IMAGE [--podman-runs 20] [--podman-usr]]
"""

import argparse
import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ludic_sandbox import (
    BaseSandboxPool,
    BubblewrapSandboxPool,
    PodmanConfig,
    PodmanSandboxPool,
    SubprocessSandboxPool,
)
from ludic_sandbox.bubblewrap import find_interpreter
from ludic_sandbox.remote.client import RemoteSandboxPool

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


@contextlib.contextmanager
def sandbox_server(num_workers: int) -> Iterator[str]:
    """The address of a sandbox server in another process."""
    os.environ["LUDIC_SANDBOX_TOKEN"] = "benchmark"
    command = [sys.executable, "-m", "ludic.cli.main", "sandbox-server", "--port", "0", "--workers", str(num_workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("Sandbox server at ").partition(": ")[0]
        server.terminate()


def cpu_seconds() -> float:
    """Of this process and its children so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=200)
    arguments.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments.add_argument("--podman-image", help="also measure podman with this image, which has a python3")
    arguments.add_argument("--podman-runs", type=int, default=20)
    arguments.add_argument("--podman-usr", action="store_true", help="its containers see the host's /usr")
    options = arguments.parse_args()
    num_runs, num_workers = options.runs, options.workers
    print(f"{'':34} {'runs/s':>8} {'median ms':>10} {'p95 ms':>8} {'CPU ms/run':>11} {'plain/this':>11}")
    before = cpu_seconds()
    base = num_runs / plain(num_runs, num_workers)
    cpu = (cpu_seconds() - before) / num_runs * 1000
    print(f"{'subprocess.run, no pool':34} {base:8.1f} {'—':>10} {'—':>8} {cpu:11.1f} {1.0:11.2f}")

    def measure(name: str, pool: BaseSandboxPool, num_runs: int = num_runs, num_at_once: int = num_workers) -> None:
        before = cpu_seconds()
        seconds, latencies = asyncio.run(pooled(pool, num_runs, num_at_once))
        cpu, rate = (cpu_seconds() - before) / num_runs * 1000, num_runs / seconds
        shown = (
            f"{cpu:11.1f}" if "remote" not in name else f"{'—':>11}"
        )  # the server's time is counted when it has ended
        p95 = statistics.quantiles(latencies, n=20)[-1]
        print(f"{name:34} {rate:8.1f} {statistics.median(latencies):10.1f} {p95:8.1f} {shown} {base / rate:11.2f}")

    measure("subprocess backend", SubprocessSandboxPool(n_workers=num_workers))
    measure("bubblewrap", BubblewrapSandboxPool(n_workers=num_workers))
    measure("bubblewrap, twice the pool", BubblewrapSandboxPool(n_workers=2 * num_workers))
    with sandbox_server(num_workers) as url:
        measure("remote bubblewrap", RemoteSandboxPool(url))
        twice = 2 * num_workers
        measure("remote bubblewrap, twice at once", RemoteSandboxPool(url, n_workers=twice), num_at_once=twice)
    if options.podman_image:
        extra = ("--volume", "/usr:/usr:ro") if options.podman_usr else ()
        config = PodmanConfig(base_image=options.podman_image, extra_args=extra)
        measure("podman", PodmanSandboxPool(config, n_workers=num_workers), options.podman_runs)


if __name__ == "__main__":
    main()
