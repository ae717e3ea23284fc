"""The pipeline: actors push groups of samples to Redis, learners train on them, either may restart.

`run` and `cli` import it. It loads without Redis; classes that need Redis raise MissingExtra when they are built. Start with
actor.py and source.py (the two ends), then queue.py. `ludic.cli.pipeline.supervisor` restarts actors and learners that die.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludic.batch_gen.pipeline.actor import ActorReport, run_pipeline_actor
    from ludic.batch_gen.pipeline.connection import RedisGone
    from ludic.batch_gen.pipeline.lease import LeaseHeld, LeaseLost, LeaseTimes
    from ludic.batch_gen.pipeline.queue import ExperienceQueue
    from ludic.batch_gen.pipeline.source import PipelineBatchSource
    from ludic.batch_gen.pipeline.stats import PipelineStats
    from ludic.batch_gen.pipeline.wire import UnreadableGroup, WireLimits

_HOMES = {
    "PipelineBatchSource": "source",
    "run_pipeline_actor": "actor",
    "ActorReport": "actor",
    "PipelineStats": "stats",
    "ExperienceQueue": "queue",
    "LeaseHeld": "lease",
    "LeaseLost": "lease",
    "LeaseTimes": "lease",
    "RedisGone": "connection",
    "UnreadableGroup": "wire",
    "WireLimits": "wire",
}

__all__ = [
    "PipelineBatchSource", "run_pipeline_actor", "ActorReport", "PipelineStats", "ExperienceQueue",
    "LeaseHeld", "LeaseLost", "LeaseTimes", "RedisGone", "UnreadableGroup", "WireLimits",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import each part on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
