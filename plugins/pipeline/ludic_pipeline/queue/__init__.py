"""The pipeline: actors push groups of samples to Redis, learners train on them, either may restart.

It loads without Redis; classes that need Redis raise MissingExtra when they are built. Start with
actor.py and source.py (the two ends), then queue.py. `ludic_pipeline.launch.supervisor` restarts actors and learners that die.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic_pipeline.queue.actor import ActorReport, ActorSettings, run_pipeline_actor
    from ludic_pipeline.queue.connection import RedisGone
    from ludic_pipeline.queue.lease import LeaseHeld, LeaseLost, LeaseTimes
    from ludic_pipeline.queue.queue import ExperienceQueue
    from ludic_pipeline.queue.source import PipelineBatchSource
    from ludic_pipeline.queue.stats import PipelineStats
    from ludic_pipeline.queue.wire import UnreadableGroup, WireLimits

__all__ = [
    "PipelineBatchSource", "run_pipeline_actor", "ActorReport", "ActorSettings", "PipelineStats", "ExperienceQueue",
    "LeaseHeld", "LeaseLost", "LeaseTimes", "RedisGone", "UnreadableGroup", "WireLimits",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "source": "PipelineBatchSource",
        "actor": "run_pipeline_actor ActorReport ActorSettings",
        "stats": "PipelineStats",
        "queue": "ExperienceQueue",
        "lease": "LeaseHeld LeaseLost LeaseTimes",
        "connection": "RedisGone",
        "wire": "UnreadableGroup WireLimits",
    },
)
