"""Speed of grading reference solutions: the sandbox and its judges, against a plain subprocess per test.

The plain baseline is what small harnesses do: one Python process per assert with solution and assert in it, without a
sandbox, so that the program can read the expected value. Ludic runs the calls of a problem in one sandboxed process and
judges outside. Both keep the same number of processes busy and see the same asserts. The result cache is off.

    .venv/bin/python research/experiments/code_grading.py [--data humaneval.jsonl[.gz]] [--workers 2] [--repeats 3]
"""

import argparse
import asyncio
import gzip
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ludic_sandbox import SandboxPool, create_sandbox_pool
from ludic_sandbox.code_exec import CodeExecConfig, HumanEvalEnv

Sample = dict[str, Any]
SHIPPED = Path(__file__).parents[2] / "tests" / "data" / "humaneval.jsonl.gz"
WHOLE = 164
"""HumanEval problems; the tests' file has 120 of them."""
CONFIG = CodeExecConfig(use_cache=False, timeout_per_test_s=60.0)


async def ours(sample: Sample, pool: SandboxPool) -> bool:
    env = HumanEvalEnv(sample, sandbox_pool=pool, config=CONFIG)
    await env.async_reset(seed=0)
    outcome = (await env.async_step({"agent_0": str(env.reference_action("agent_0"))}))["agent_0"]
    return outcome.reward == 1.0


async def plain(sample: Sample) -> bool:
    """One process per test, until one fails."""
    env = HumanEvalEnv(sample, config=CONFIG)
    program = str(env.reference_action("agent_0"))
    for test in env.tests:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"{program}\n\n{test.expected}", stderr=asyncio.subprocess.DEVNULL
        )
        if await process.wait() != 0:
            return False
    return True


async def timed(samples: Sequence[Sample], grade: Callable[[Sample], Awaitable[bool]], workers: int) -> float:
    limit = asyncio.Semaphore(workers)

    async def one(sample: Sample) -> bool:
        async with limit:
            return await grade(sample)

    started = time.perf_counter()
    passed = await asyncio.gather(*map(one, samples))
    if not all(passed):
        raise SystemExit(f"{passed.count(False)} of {len(passed)} references failed")
    return time.perf_counter() - started


async def measure(samples: Sequence[Sample], workers: int, repeats: int) -> None:
    num_tests = sum(len(HumanEvalEnv(sample).tests) for sample in samples)
    print(f"{len(samples)} problems, {num_tests} tests, {workers} at a time; {repeats} rounds, in turns")
    rounds: dict[str, list[float]] = {"in the sandbox, judged outside": [], "one subprocess per test, unprotected": []}
    async with await create_sandbox_pool(n_workers=workers) as pool:
        for _ in range(repeats):
            for name, grade in zip(rounds, (lambda s: ours(s, pool), plain), strict=True):
                rounds[name].append(await timed(samples, grade, workers) * WHOLE / len(samples))
    for name, seconds in rounds.items():
        print(f"{name:38} {min(seconds):6.2f} s per {WHOLE} at best, {statistics.median(seconds):6.2f} s in the middle")
    ratios = [theirs / own for own, theirs in zip(*rounds.values(), strict=True)]
    print(
        f"{'times faster':38} {statistics.median(ratios):6.2f} in the middle ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def read(path: Path) -> list[Sample]:
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHIPPED)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(measure(read(arguments.data), arguments.workers, arguments.repeats))
