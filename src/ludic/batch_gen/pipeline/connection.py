"""Reaching Redis: addresses, patience while it is away, and messages that never show a password."""

import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ludic.types import ConfigError, LudicError, MissingExtra

if TYPE_CHECKING:
    import redis
    import redis.asyncio

logger = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix")
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0


class RedisGone(LudicError, ConnectionError):
    """Redis could not be reached for longer than we are prepared to wait."""


def require_redis(needed_for: str) -> None:
    try:
        import redis.asyncio  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise MissingExtra("pipeline", needed_for) from error


def shown(redis_url: str) -> str:
    """The address without user, password and options, for messages."""
    try:
        parts = urlsplit(redis_url)
        place = parts.hostname or ""
        if parts.port is not None:
            place += f":{parts.port}"
    except ValueError:
        return "an address that cannot be read"
    return f"{parts.scheme}://{place}{parts.path}"


@dataclass(frozen=True)
class RedisAddress:
    """Where Redis is, and how a client of it is set up."""

    url: str = field(repr=False)
    """redis://, rediss:// (TLS) or unix://, with a password where it needs one."""
    timeout_s: float = 30.0
    """How long a single answer may take; the largest are of some ten megabytes."""

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
            # Not chained: what the parser could not read may be a piece of the password.
            raise ConfigError(
                "redis_url cannot be read: it must look like redis://user:password@host:6379/0, and characters "
                "such as @ / : # in a password must be percent-encoded."
            ) from None

    def __str__(self) -> str:
        return shown(self.url)

    def async_client(self) -> "redis.asyncio.Redis":
        """Belongs to the event loop that first uses it. It waits for ever: whoever calls it says for how long, since its own
        time-out (asyncio.wait_for) can swallow a cancellation before Python 3.12."""
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
        """Whatever the address says. The client's own retries are off: after a lost reply a take must first look at what it
        may have been given, which only we know how to do."""
        return {"decode_responses": False, "socket_connect_timeout": self.timeout_s}


class Patience:
    """How long a lost Redis is waited for, from the first failure on."""

    def __init__(self, address: RedisAddress, patience_s: float) -> None:
        self._address, self._patience_s = address, patience_s
        self._since: float | None = None
        self._wait_s = _FIRST_WAIT_S

    def wait_after(self, error: Exception) -> float:
        """Seconds until the next try; what happened, where it is not worth one."""
        refuse_login(error, self._address)
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.warning("Redis at %s does not answer (%s); trying again", self._address, type(error).__name__)
        if now - self._since >= self._patience_s:
            raise RedisGone(
                f"Redis at {self._address} has not answered for {now - self._since:.0f} s ({type(error).__name__}: {error}). "
                "Is it running, and can this machine reach it? Nothing is lost: start it again, and this process with it."
            ) from error
        wait, self._wait_s = self._wait_s, min(2 * self._wait_s, _LONGEST_WAIT_S)
        # Not all who were cut off at the same moment should come back at the same moment.
        return wait * random.uniform(0.75, 1.25)

    def answered(self) -> None:
        if self._since is not None:
            logger.warning("Redis at %s is back after %.1f s", self._address, time.monotonic() - self._since)


def refuse_login(error: Exception, address: RedisAddress) -> None:
    """A wrong password is a matter for the user, not for patience."""
    import redis.exceptions as failures

    reason: BaseException | None = error
    while reason is not None:  # the client may wrap it as a failed connection
        if isinstance(reason, (failures.AuthenticationError, failures.AuthorizationError)):
            raise ConfigError(
                f"Redis at {address} refuses the login ({reason}). Check user and password in redis_url."
            ) from error
        reason = reason.__cause__


def away() -> tuple[type[Exception], ...]:
    """What is worth another try: no connection, no answer, still loading, out of memory, a replica for the moment."""
    import redis.exceptions as failures

    return (
        failures.ConnectionError,
        failures.TimeoutError,
        failures.OutOfMemoryError,
        failures.ReadOnlyError,
        OSError,
        EOFError,
    )
