"""The one place where a failed episode becomes data."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ludic.types import Rollout

logger = logging.getLogger(__name__)


async def run_or_record(run: Callable[[], Awaitable[list[Rollout]]], *, meta: dict[str, Any]) -> list[Rollout]:
    """The rollouts of an episode, or one rollout that says why there are none."""
    try:
        return await run()
    except Exception as error:  # noqa: BLE001 - one bad episode must not cancel its siblings
        logger.warning("An episode failed: %s: %s (%s)", type(error).__name__, error, meta)
        return [Rollout.failed(error, meta=meta)]
