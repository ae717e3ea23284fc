"""Runs many jobs with bounded concurrency and cancels the rest when the consumer stops.

Workers take jobs from one iterator, so a pending job costs nothing. Closing the generator (after an error, a cancellation
or a `break`) cancels the running jobs and waits for them.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Job: TypeAlias = Callable[[], Awaitable[T]]


async def as_finished(jobs: Iterable[Job[T]], *, limit: int) -> AsyncGenerator[T, None]:
    """Yield the results of `jobs` as they finish; at most `limit` jobs run at once."""
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
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


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
