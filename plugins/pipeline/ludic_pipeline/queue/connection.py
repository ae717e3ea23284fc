"""Connections to Redis: addresses, retries while it is unreachable, and messages that never show a password."""

import logging
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ludic.types import ConfigError, MissingExtra, shown_url
from ludic.types.errors import TryAgain, retry_wait_s

if TYPE_CHECKING:
    import redis
    import redis.asyncio

logger = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix")
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0
_SAY_AGAIN_S = 60.0
_CODE = re.compile(
    r"\b(OOM|LOADING|BUSY|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|MISCONF|WRONGTYPE|NOPERM|NOAUTH|WRONGPASS)\b"
)
_CODE_OF_TYPE = {
    "OutOfMemoryError": "OOM",
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "NoPermissionError": "NOPERM",
}
_PASSING = frozenset(
    {"LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF", "OOM"}
)
"""Errors that are worth a retry: Redis loads its data, runs a script, is a replica for the moment, cannot write to its disk, or
has no memory left."""
_LOGIN = frozenset({"NOPERM", "NOAUTH", "WRONGPASS"})


class RedisGone(TryAgain, ConnectionError):
    """Redis was unreachable for longer than `patience_s`."""


def require_redis(needed_for: str) -> None:
    try:
        import redis.asyncio  # noqa: F401 - checks that it is installed
    except ImportError as error:
        raise MissingExtra("pipeline", needed_for) from error


@dataclass(frozen=True)
class RedisAddress:
    """Address of Redis and the settings of its clients."""

    url: str = field(repr=False)
    """redis://, rediss:// (TLS) or unix://, with a password if needed."""
    timeout_s: float = 30.0
    """Time limit of one answer; the largest have some ten megabytes."""

    def __post_init__(self) -> None:
        require_redis("A pipeline over Redis")
        if self.url.partition("://")[0] not in SCHEMES:
            raise ConfigError(
                "redis_url has no scheme that Redis speaks; use redis://host:6379/0, rediss://… for TLS, "
                "or unix:///path/to/socket."
            )
        try:
            self.sync_client()
        except (ValueError, TypeError):
            # Not chained: the parser's message may contain a piece of the password.
            raise ConfigError(
                "redis_url cannot be read: it must look like redis://user:password@host:6379/0, and characters "
                "such as @ / : # in a password must be percent-encoded."
            ) from None

    def __str__(self) -> str:
        return shown_url(self.url)

    def async_client(self) -> "redis.asyncio.Redis":
        """A client for the event loop that first uses it. It has no time-out, the caller sets one: redis-py's own time-out
        (asyncio.wait_for) can swallow a cancellation before Python 3.12."""
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        pool = redis.asyncio.ConnectionPool.from_url(self.url)
        pool.connection_kwargs.update(self._always(), socket_timeout=None, retry=Retry(NoBackoff(), 0))
        return redis.asyncio.Redis.from_pool(pool)

    def sync_client(self) -> "redis.Redis":
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        pool = redis.ConnectionPool.from_url(self.url)
        pool.connection_kwargs.update(self._always(), socket_timeout=self.timeout_s, retry=Retry(NoBackoff(), 0))
        return redis.Redis.from_pool(pool)

    def _always(self) -> dict[str, Any]:
        """Settings for every address. The client's own retries are off: after a lost reply, a take must first read the groups
        that it may have been given."""
        return {"decode_responses": False, "socket_connect_timeout": self.timeout_s}


def code_of(error: BaseException) -> str | None:
    """The error code of Redis. redis-py turns some codes into exception types; a script's error has the code in its text."""
    known = _CODE_OF_TYPE.get(type(error).__name__)
    if known is None and (found := _CODE.search(str(error))) is not None:
        return found[1]
    return known


class RetryBackoff:
    """Back-off while Redis is unreachable or temporarily refuses, up to `patience_s` after the first failure.

    `waits_for_room`: wait without limit while Redis is at maxmemory. For pushes: the learner makes room.
    """

    def __init__(self, address: RedisAddress, patience_s: float, *, waits_for_room: bool = False) -> None:
        self._address, self._patience_s, self._waits_for_room = address, patience_s, waits_for_room
        self._since: float | None = None
        self._say_at = 0.0
        self._num_failures = 0

    def wait_after(self, error: Exception) -> float:
        """Seconds until the next attempt. Raises an error that a retry cannot fix."""
        _refuse_for_good(error, self._address)
        now = time.monotonic()
        is_full = code_of(error) == "OOM"
        if self._since is None:
            self._since = now
        if now >= self._say_at:
            self._say_at = now + _SAY_AGAIN_S
            logger.warning("Redis at %s %s; trying again", self._address, _what_is_wrong(error))
        if now - self._since >= self._patience_s and not (is_full and self._waits_for_room):
            raise RedisGone(
                f"Redis at {self._address} has not answered for {now - self._since:.0f} s: it {_what_is_wrong(error)}. Is it "
                "running, and can this machine reach it? Nothing is lost: start it again, and this process with it."
            ) from error
        self._num_failures += 1
        return retry_wait_s(self._num_failures - 1, _FIRST_WAIT_S, _LONGEST_WAIT_S)

    def answered(self) -> None:
        if self._since is not None:
            logger.warning("Redis at %s is back after %.1f s", self._address, time.monotonic() - self._since)


def _what_is_wrong(error: Exception) -> str:
    code, said = code_of(error), str(error).rpartition("caused error: ")[2]  # without the command, which holds payloads
    if code == "OOM":
        return (
            "has no memory left (maxmemory), so groups wait with the actors until the learner has made room. Samples stay in Redis "
            "until a checkpoint has them: raise maxmemory, lower checkpoint_every or max_waiting, or use acknowledge = 'trained'"
        )
    if code == "MISCONF":
        return f"cannot write to its disk ({said})"
    return (
        f"does not answer ({type(error).__name__}: {said})"
        if code is None
        else f"refuses for the moment ({code}: {said})"
    )


def _refuse_for_good(error: Exception, address: RedisAddress) -> None:
    """Raise ConfigError for errors that only the user can fix: a wrong password, an unsupported command."""
    import redis.exceptions as failures

    reason: BaseException | None = error
    while reason is not None:  # the client may wrap it as a failed connection
        is_login = isinstance(reason, (failures.AuthenticationError, failures.AuthorizationError))
        if is_login or code_of(reason) in _LOGIN:
            raise ConfigError(
                f"Redis at {address} refuses the login ({reason}). Check user and password in redis_url, and what that user "
                "may do: the queue needs streams, hashes, strings and scripts."
            ) from error
        reason = reason.__cause__
    if isinstance(error, failures.ResponseError) and code_of(error) not in _PASSING:
        raise ConfigError(
            f"Redis at {address} refuses what the queue asks for: {error}. The queue needs Redis 6.2 or newer, or Valkey, "
            "and keys that no other program writes to; with another queue_key it starts empty."
        ) from error


def away() -> tuple[type[Exception], ...]:
    """Exceptions that may be worth a retry (`RetryBackoff.wait_after` decides): no connection, no answer, a refusal."""
    import redis.exceptions as failures

    return (
        failures.ConnectionError,
        failures.TimeoutError,
        failures.ResponseError,
        OSError,
        EOFError,
    )
