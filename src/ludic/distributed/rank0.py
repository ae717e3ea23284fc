"""One of several trainer processes publishes."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from ludic.types import ChecksServers, PolicyPublisher


class Rank0OnlyPublisher:
    """Makes the real publisher on rank 0, when it is first needed; on other ranks there is none, and no connection."""

    def __init__(self, make_inner: Callable[[], PolicyPublisher], *, enabled: bool = True) -> None:
        """`enabled=False`: nobody publishes (a dry run)."""
        self._make_inner, self._enabled = make_inner, enabled
        self._inner: PolicyPublisher | None = None

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        if self._enabled and process_rank() == 0:
            if self._inner is None:
                self._inner = self._make_inner()
            self._inner.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        """Where nothing has been published from here, nothing can have been lost."""
        return not isinstance(self._inner, ChecksServers) or self._inner.is_current(version)


def process_rank() -> int:
    """Of this process among the trainer's; 0 when there is only one."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))  # torchrun sets it before any group is there
