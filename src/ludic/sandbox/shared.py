"""One pool per event loop for whoever brings none: envs, tools and games share its processes and its cache."""

import asyncio
import os
from weakref import WeakKeyDictionary

from ludic.sandbox.backends import create_sandbox_pool
from ludic.sandbox.pool import BaseSandboxPool

_pools: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[BaseSandboxPool]]" = WeakKeyDictionary()


async def shared_pool() -> BaseSandboxPool:
    """The pool of the running event loop, with the first backend that works here and a sandbox per core.

    Made at the first call and shut down when the loop ends (as `asyncio.run` ends it: by cancelling what still runs).
    """
    loop = asyncio.get_running_loop()
    if loop not in _pools or _is_of_no_use(_pools[loop]):
        _pools[loop] = asyncio.create_task(_start())
    return await asyncio.shield(_pools[loop])


async def _start() -> BaseSandboxPool:
    pool = await create_sandbox_pool(n_workers=os.cpu_count() or 1)
    keeper = asyncio.create_task(_keep(pool))
    _keepers[pool] = keeper
    return pool


async def _keep(pool: BaseSandboxPool) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        _pools.pop(asyncio.get_running_loop(), None)  # its value holds the loop, which would never be forgotten
        await pool.shutdown()


_keepers: "WeakKeyDictionary[BaseSandboxPool, asyncio.Task[None]]" = WeakKeyDictionary()
"""The loop itself holds its tasks weakly."""


def _is_of_no_use(starting: "asyncio.Task[BaseSandboxPool]") -> bool:
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().has_given_up
