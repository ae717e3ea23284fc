"""Steps per second of an env in process and in worker processes (docs/env-workers.md), in one run:

    python benchmarks/env_workers.py --workers 4 --envs 512 --seconds 3

The env is trivial (an observation of one line), so that the numbers are the cost of the transport. `thinks` computes for a
millisecond per step, which the workers share out over the cores.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.types import StepOutcome
from ludic_envs.workers import EnvPool, EnvServer

_STEPS = 16
"""Of an episode."""


class Counts(SingleAgentEnv):
    """Counts its steps."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._num = 0
        return "Say anything.", {}

    def env_step(self, action: str) -> StepOutcome:
        self._num += 1
        return StepOutcome(f"Step {self._num}.", 0.0, terminated=self._num == _STEPS, info={"num": self._num})


class CountsInAThread(Counts):
    """The same in a thread, as an env that does not say otherwise."""

    blocking = True


class Thinks(Counts):
    """Computes for a millisecond per step."""

    blocking = False

    def env_step(self, action: str) -> StepOutcome:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return super().env_step(action)


Make = Callable[[], Awaitable[LudicEnv[Any, Any, Any]]]


async def steps_per_s(make: Make, *, num_envs: int, seconds: float) -> float:
    """Play episodes in `num_envs` envs at a time."""
    num_steps, stop_at = 0, 0.0

    async def play() -> None:
        nonlocal num_steps
        env = await make()
        while time.perf_counter() < stop_at:
            await env.async_reset(seed=0)
            while env.active_agents:
                await env.async_step({"agent_0": "x"})
                num_steps += 1
        await env.async_close()

    warm = await make()
    await warm.async_reset(seed=0)
    await warm.async_close()
    began = time.perf_counter()
    stop_at = began + seconds
    await asyncio.gather(*(play() for _ in range(num_envs)))
    return num_steps / (time.perf_counter() - began)


async def compare(kind: type[Counts], args: argparse.Namespace) -> None:
    async def in_process() -> LudicEnv[Any, Any, Any]:
        return kind()

    sizes = {"num_envs": args.envs, "seconds": args.seconds}
    here = await steps_per_s(in_process, **sizes)
    async with EnvPool(kind, workers=args.workers) as pool:
        there = await steps_per_s(pool.make, **sizes)
    print(
        f"{kind.__name__:16} in process {here:10,.0f}   {args.workers} workers {there:10,.0f}   x {there / here:.2f}",
        end="",
    )
    if args.server:
        print(f"   env server {await through_server(kind, args, sizes):10,.0f}", end="")
    print(flush=True)


async def through_server(kind: type[Counts], args: argparse.Namespace, sizes: dict[str, Any]) -> float:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = EnvServer({"env": f"{__file__}:{kind.__name__}"}, workers=args.workers, token="benchmark")
    serving = asyncio.create_task(server.serve("127.0.0.1", 0, on_ready=ready.set_result))
    try:
        async with EnvPool(server=await ready, token="benchmark") as pool:
            return await steps_per_s(pool.make, **sizes)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--envs", type=int, default=512, help="envs at a time")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--server", action="store_true", help="measure an env server on this machine, too")
    parser.add_argument("--only", choices=["Counts", "CountsInAThread", "Thinks"])
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"Steps per second, {args.envs} envs at a time, {os.cpu_count()} cores (load before: {load:.1f})")
    for kind in (Counts, CountsInAThread, Thinks):
        if args.only in (None, kind.__name__):
            await compare(kind, args)


if __name__ == "__main__":
    asyncio.run(main())
