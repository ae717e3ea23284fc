"""Ctrl-C and SIGTERM while training; the code is in `ludic.util.stop`."""

from ludic.util.stop import SAME_REQUEST_S, StopRequested, StopRequests, StopSignal, run_sync

__all__ = ["SAME_REQUEST_S", "StopRequested", "StopRequests", "StopSignal", "run_sync"]
