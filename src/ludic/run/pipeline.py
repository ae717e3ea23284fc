"""The settings of a pipeline (`engine = "pipeline"`), and what its roles hand each other through the environment.

`ludic launch` tells its children where Redis and the server are by variables: what stands in a run's config.toml is only
what its user said, and a password is in no file and no list of processes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ludic.run.settings import MaybeInt, MaybeText
from ludic.types import ConfigError, shown_url
from ludic.types.urls import refuse_login

REDIS_VARIABLE = "LUDIC_REDIS_URL"
SERVER_VARIABLE = "LUDIC_SERVER"
"""URLs of the vLLM servers, with spaces between them."""
DEFAULT_MAX_LAG = 4
TRY_AGAIN = 75
"""Exit code of a role that lost what it needs (the policy, Redis, its lease): another try may go well (EX_TEMPFAIL)."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """For engine = pipeline: actors of their own, and the queue between them and the learner."""

    redis: MaybeText = None
    """URL of the queue's Redis. Default: $LUDIC_REDIS_URL, which may hold a password; else `ludic launch` starts a Redis."""
    queue_key: MaybeText = None
    """Name of the queue in Redis. Default: ludic: and the name of the run."""
    actors: int = 2
    """How many actors `ludic launch` starts."""
    actor_engine: Literal["local", "vllm"] = "local"
    """What actors sample with: local is an engine with weights of its own in each; vllm the servers."""
    max_waiting: MaybeInt = None
    """Groups that may wait in the queue; when it is full, actors wait. Default: four updates' worth, at least 64."""
    acknowledge: Literal["saved", "trained"] = "saved"
    """When a sample may be forgotten: with the first checkpoint after its update, or with the update itself."""
    corrections: bool = True
    """Tokens and samples that the trained policy has moved too far away from do not count."""
    max_restarts: int = 5
    """How often `ludic launch` restarts a role within ten minutes before it gives up."""

    def __post_init__(self) -> None:
        if self.actors < 1 or (self.max_waiting is not None and self.max_waiting < 1) or self.max_restarts < 0:
            raise ConfigError(
                f"actors = {self.actors}, max_waiting = {self.max_waiting}, max_restarts = {self.max_restarts}; the first two "
                "are at least 1, the last 0."
            )
        if self.redis is not None:
            _check_url(self.redis)


def _check_url(url: str) -> None:
    if url.partition("://")[0] not in ("redis", "rediss", "unix"):
        raise ConfigError(f"redis = {shown_url(url)!r}; a Redis URL begins with redis://, rediss:// (TLS) or unix://.")
    refuse_login(
        "redis", url, f"Put the URL into the environment variable {REDIS_VARIABLE} instead, and for --resume again."
    )


def given_redis(settings: PipelineSettings) -> str | None:
    return settings.redis or os.environ.get(REDIS_VARIABLE) or None


def redis_url(settings: PipelineSettings) -> str:
    """Where the queue is; an error where nobody said."""
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
