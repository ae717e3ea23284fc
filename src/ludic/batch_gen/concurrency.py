"""Many jobs, a bounded number at once, and none left behind.

A few workers take jobs from one iterator, so a job that has not begun costs nothing. Results come as they finish;
whoever stops listening (an error, a cancellation, a `break`) thereby cancels what is still running and waits for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Job: TypeAlias = Callable[[], Awaitable[T]]


async def as_finished(jobs: Iterable[Job[T]], *, limit: int) -> AsyncGenerator[T, None]:
    """The results of `jobs` in the order in which they finish, at most `limit` jobs running at once."""
    finished: asyncio.Queue[T | asyncio.Task[None]] = asyncio.Queue()
    # A slow listener holds the workers up: what waits to be taken is bounded like what runs.
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
                got.result()  # raises what the job raised
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
            room.release()  # another worker may be waiting for the place only to learn the same
            return
        finished.put_nowait(await job())
