"""The engine `pipeline` as a feature of `ludic train`: its section of the settings, and what it excludes. Loads without torch.

`ludic launch` tells its children where Redis and the server are by environment variables: config.toml holds what the user wrote,
and a password is in no file and in no list of processes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ludic.run.config.entries import at_least
from ludic.run.config.run_config import RunConfig
from ludic.run.features.base import Engine, Fact, because
from ludic.run.given import Parts
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import may_change
from ludic.types import ConfigError, shown_url
from ludic.util.urls import refuse_login
from ludic_pipeline.queue.connection import SCHEMES

REDIS_VARIABLE = "LUDIC_REDIS_URL"
SERVER_VARIABLE = "LUDIC_SERVER"
"""URLs of the vLLM servers, with spaces between them."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """For engine = pipeline: separate actor processes, and the queue between them and the learner."""

    redis: str | None = may_change(None)
    """URL of the queue's Redis. Default: $LUDIC_REDIS_URL, which may hold a password; else `ludic launch` starts a Redis."""
    queue_key: str | None = None
    """Name of the queue in Redis. Default: ludic: and the name of the run."""
    actors: int = may_change(2)
    """Actors that `ludic launch` starts."""
    actor_engine: Literal["local", "vllm"] = "local"
    """The engine that actors sample with: local has its own weights in each; vllm is the servers."""
    max_waiting: int | None = may_change(None)
    """Groups that may wait in the queue; when it is full, actors wait. Default: four updates' worth, at least 64."""
    acknowledge: Literal["saved", "trained"] = may_change("saved")
    """When a sample may be forgotten: with the first checkpoint after its update, or with the update itself."""
    corrections: bool = True
    """Tokens and samples that the trained policy has moved too far away from do not count."""
    max_restarts: int = may_change(5)
    """Restarts within ten minutes after which `ludic launch` gives up a role, and a run its own vLLM server."""

    def __post_init__(self) -> None:
        at_least(1, actors=self.actors, max_waiting=self.max_waiting)
        at_least(0, max_restarts=self.max_restarts)
        if self.redis is not None:
            if self.redis.partition("://")[0] not in SCHEMES:
                raise ConfigError(
                    f"redis = {shown_url(self.redis)!r}; a Redis URL begins with redis://, rediss:// (TLS) or unix://."
                )
            how = f"Put the URL into the environment variable {REDIS_VARIABLE} instead, and for --resume again."
            refuse_login("redis", self.redis, how)


def pipeline_of(config: RunConfig) -> PipelineSettings:
    """The section [pipeline] of a run's settings."""
    found: PipelineSettings = config.plugins["pipeline"]
    return found


def queue_key_of(run: ResolvedRun) -> str:
    """Name of the run's queue in Redis."""
    key = pipeline_of(run.config).queue_key
    assert key is not None, "resolve fills it in for a pipeline"
    return key


def given_redis(settings: PipelineSettings) -> str | None:
    return settings.redis or os.environ.get(REDIS_VARIABLE) or None


def redis_url(settings: PipelineSettings) -> str:
    """URL of the queue; ConfigError if none was given."""
    url = given_redis(settings)
    if url is None:
        raise ConfigError(
            f"engine = 'pipeline' needs a Redis that learner and actors share: give --redis redis://HOST:6379/0, set "
            f"${REDIS_VARIABLE}, or use `ludic launch`, which starts one with everything else on this machine."
        )
    return url


def given_servers(servers: Sequence[str]) -> tuple[str, ...]:
    return tuple(servers) or tuple(os.environ.get(SERVER_VARIABLE, "").split())


def required_servers(servers: Sequence[str]) -> tuple[str, ...]:
    found = given_servers(servers)
    if not found:
        raise ConfigError(
            "actor_engine = 'vllm' needs servers: give --server URL (`ludic serve --engine vllm` starts one), or use `ludic "
            "launch`, which starts one on this machine."
        )
    return found


_ACTORS_PLAY = (
    "these are for runs that play their own episodes (engine = local or vllm); in a pipeline actors play them."
)
_OBJECTS = "it is an object of this process, and in a pipeline actors play the episodes."


class Pipeline(Engine):
    """Actors in separate processes play, and a queue is between them and the learner."""

    engine = "pipeline"
    session = "ludic_pipeline.generation:PipelineSession"
    section = "pipeline"
    Settings = PipelineSettings
    plays_here = False
    batches_behind = 4
    command = "launch"
    retries_a_divergence = True  # a batch that ends a few learners is set aside
    excludes = (
        because(
            _ACTORS_PLAY,
            "dynamic_sampling", "curriculum", "close_batch_at", "filter", "[[recorded]]", "[replay]", "rollouts", "[[envs]]",
        )
        | because(
            "use local or vllm, or wrap the learner's source in code (TeacherAnnotatedBatchSource).", "teacher", "[teachers]"
        )
        | because(
            f"{_OBJECTS} Give reward='file.py:function', or an env of your own, whose step grades the answer.",
            "scorers=", "reward= of an agent behind the gateway",
        )
        | because(_OBJECTS, "policies= of an agent behind the gateway", "source=")
    )  # fmt: skip

    def samples_on_servers(self, config: RunConfig) -> bool:
        return pipeline_of(config).actor_engine == "vllm"

    def corrects_lag(self, config: RunConfig) -> bool:
        return pipeline_of(config).corrections

    def filled(self, config: RunConfig, name: str, group_size: int) -> dict[str, Any]:
        settings, num_groups = pipeline_of(config), config.rollouts.rollouts_per_update // group_size
        return {
            "queue_key": settings.queue_key or f"ludic:{name}",
            "max_waiting": settings.max_waiting or max(64, 4 * num_groups),
        }


PIPELINE = Pipeline()


def _has_redis(config: RunConfig, _: Parts) -> bool:
    return pipeline_of(config).redis is not None


REDIS = Fact("redis", _has_redis, needs={PIPELINE.name: "it is the queue between actors and learner."})
