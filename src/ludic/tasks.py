"""Asyncio tasks that run and end together, and the garbage collector around them."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Job: TypeAlias = Callable[[], Awaitable[T]]


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel the tasks and wait until they have ended; their results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result, once it has ended: a cancellation is raised only then, however many there are."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled() and task.exception() is None:
        raise cancelled
    return task.result()


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised."""
    todo = list(coroutines)
    if len(todo) == 1:
        return [await todo[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in todo]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise


async def as_finished(jobs: Iterable[Job[T]], *, limit: int) -> AsyncGenerator[T, None]:
    """Yield the results of `jobs` as they finish; at most `limit` jobs run at once.

    Workers take jobs from one iterator, so a pending job costs nothing. Closing the generator (after an error, a cancellation
    or a `break`) cancels the running jobs and waits for them.
    """
    finished: asyncio.Queue[T | asyncio.Task[None]] = asyncio.Queue()
    # Back-pressure: a slow consumer stops the workers once 2 * limit jobs are running or waiting to be consumed.
    room = asyncio.Semaphore(2 * limit)
    waiting = iter(jobs)
    workers = [asyncio.create_task(_work(waiting, finished, room)) for _ in range(limit)]
    for worker in workers:
        worker.add_done_callback(finished.put_nowait)
    num_working = len(workers)
    try:
        while num_working:
            got = await finished.get()
            if isinstance(got, asyncio.Task):
                got.result()  # re-raises the job's error
                num_working -= 1
            else:
                room.release()
                yield got
    finally:
        await cancel_all(workers)


async def _work(
    waiting: Iterator[Job[T]], finished: "asyncio.Queue[T | asyncio.Task[None]]", room: asyncio.Semaphore
) -> None:
    while True:
        await room.acquire()
        job = next(waiting, None)
        if job is None:
            room.release()  # wakes other workers so that they see the end too
            return
        finished.put_nowait(await job())


@contextmanager
def long_lived_objects_exempt() -> Iterator[None]:
    """Exempt the objects that exist now from garbage collection inside the block: a pass over the 400,000 of torch, transformers
    and a model stops all threads for a quarter of a second, the engine's included. Nothing changes where the program, or a block
    around this one, has exempted objects itself: to end this block would end that."""
    if gc.get_freeze_count():
        yield
        return
    exempt_from_collection()
    try:
        yield
    finally:
        gc.unfreeze()


def exempt_from_collection() -> None:
    """Exempt the objects that exist now."""
    gc.collect()
    gc.freeze()
    # Without a second pass CPython delays full collections until new objects exceed a quarter of the old ones (100,000 with
    # torch).
    gc.collect()
