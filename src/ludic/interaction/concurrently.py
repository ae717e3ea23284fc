"""Running several coroutines as one: all succeed, or none is left running."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others before it travels on."""
    todo = list(coroutines)
    if len(todo) == 1:
        return [await todo[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in todo]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
