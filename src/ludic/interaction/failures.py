"""The one place where a failed episode becomes data."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from ludic.interaction.base import InteractionProtocol
from ludic.types import ConfigError, Failure, PolicyGone, Rollout, StopReason


async def run_or_record(
    protocol: InteractionProtocol, run: Callable[[], Awaitable[list[Rollout]]], *, meta: dict[str, Any]
) -> list[Rollout]:
    """The rollouts of an episode; if it raises, the rollouts collected so far, marked as failed.

    The caller logs the failure. ConfigError is re-raised, because every other episode would fail the same way, and so is
    PolicyGone (no policy server is left). SystemExit is a failure: code of an episode must not end the program.
    """
    try:
        rollouts = await run()
    except BaseException as error:
        if not _is_failure(error):
            raise
        if isinstance(error, asyncio.CancelledError):
            what = "Something inside the episode was cancelled, and the episode with it."
            error = RuntimeError(what).with_traceback(error.__traceback__)
        rollouts = protocol.unfinished
        for rollout in rollouts:
            if rollout.stop is None:
                rollout.stop, rollout.failure = StopReason.FAILED, Failure.from_exception(error)
        if not any(rollout.failure for rollout in rollouts):
            rollouts = [Rollout.failed(error), *rollouts]
    for rollout in rollouts:
        rollout.meta = {**meta, **rollout.meta}
    return rollouts


def _is_failure(error: BaseException) -> bool:
    """True if the episode failed; False if the set-up is wrong or the program is being stopped."""
    if isinstance(error, ConfigError | PolicyGone | KeyboardInterrupt | GeneratorExit):
        return False  # Ctrl-C; a KeyboardInterrupt raised by an env arrives as a RuntimeError (envs.threads)
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()  # raised by a client or an env, not by us
    return True


T = TypeVar("T")


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised."""
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
