"""The one place where a failed episode becomes data."""

from collections.abc import Awaitable, Callable
from typing import Any

from ludic.interaction.base import InteractionProtocol
from ludic.types import ConfigError, Failure, PolicyGone, Rollout, StopReason


async def run_or_record(
    protocol: InteractionProtocol, run: Callable[[], Awaitable[list[Rollout]]], *, meta: dict[str, Any]
) -> list[Rollout]:
    """The rollouts of an episode; if it raises, what was collected until then, marked as failed.

    Nothing is logged here: the caller knows which episode it was, and how many failed before it. A ConfigError is no failed
    episode: the set-up is wrong, every other episode would fail the same way, so it travels on. So does PolicyGone, when no
    server is left to play with.
    """
    try:
        rollouts = await run()
    except (ConfigError, PolicyGone):
        raise
    except Exception as error:  # noqa: BLE001 - one bad episode must not cancel its siblings
        rollouts = protocol.unfinished
        for rollout in rollouts:
            if rollout.stop is None:
                rollout.stop, rollout.failure = StopReason.FAILED, Failure.from_exception(error)
        if not any(rollout.failure for rollout in rollouts):
            rollouts = [Rollout.failed(error), *rollouts]
    for rollout in rollouts:
        rollout.meta = {**meta, **rollout.meta}
    return rollouts
