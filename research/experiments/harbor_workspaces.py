"""Workspaces of Harbor tasks side by side: episodes per second, and what is left behind, for each kind of workspace.

Every episode opens a workspace, writes the files of a generated task, runs its reference solution and grades it.

    python research/experiments/harbor_workspaces.py --num 100 --kinds bubblewrap unsafe-local
"""

import argparse
import asyncio
import os
import time
from pathlib import Path

from ludic import registry


def left_behind() -> dict[str, int]:
    """Processes, open descriptors, temporary folders and memory groups of this process."""
    groups = Path("/sys/fs/cgroup/memory/ludic-sandbox")
    own = f"{os.getpid()}-"
    children = [Path(task, "children").read_text().split() for task in Path("/proc/self/task").iterdir()]
    return {
        "processes": sum(map(len, children)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": len(list(Path("/tmp").glob("ludic-workspace-*"))),
        "groups": sum(path.name.startswith(own) for path in groups.iterdir()) if groups.is_dir() else 0,
    }


async def episode(kind: str, seed: int, gate: asyncio.Barrier) -> tuple[float, float]:
    """The reward, and seconds from the first observation to the grade. All workspaces are open before the first is used."""
    env = registry.make("env", "examples/harbor_tasks/family.py:HarborFamilyEnv", workspace=kind, max_level=4)
    await env.async_reset(seed=seed)
    await gate.wait()
    started = time.perf_counter()
    outcome = (await env.async_step({"agent_0": env.reference_action("agent_0") or ""}))["agent_0"]
    return outcome.reward, time.perf_counter() - started


async def measure(kind: str, num: int) -> None:
    before, started = left_behind(), time.perf_counter()
    gate = asyncio.Barrier(num)
    done = await asyncio.gather(*(episode(kind, seed, gate) for seed in range(num)))
    seconds = time.perf_counter() - started
    rewards = sum(reward for reward, _ in done)
    print(f"{kind}: {num} at once, {num / seconds:.1f} episodes/s, mean reward {rewards / num:.3f}")
    print(f"  before {before}\n  after  {left_behind()}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", default=["bubblewrap", "unsafe-local"])
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        await measure(kind, arguments.num)


asyncio.run(main())
