"""HTTP for the clients in this package: one aiohttp session per event loop, with room for thousands of requests.

A session belongs to the loop that made it, while a client may be used from several: a trainer's, an evaluator's, a
publisher's thread. So sessions are made on first use, and each closes with its loop. Cancelling a request closes its
connection, which is how a server learns that nobody waits any more.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ludic.types import MissingExtra
from ludic.types.urls import known_logins, login_of, origin_of

if TYPE_CHECKING:
    import aiohttp
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ludic.types import ConfigError, LudicError

# ----------------------------------------------------------------------------------------------------
# Asking again: which failures are worth it, how long to wait, and when to give up.
# ----------------------------------------------------------------------------------------------------

T = TypeVar("T")


class EndpointError(LudicError, RuntimeError):
    """A server did not give an answer, or refused to."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status, where one came."""


class RetryableError(EndpointError):
    """Nothing is wrong with the question: worth another try."""

    def __init__(self, message: str, *, status: int | None = None, wait_s: float | None = None) -> None:
        super().__init__(message, status=status)
        self.wait_s = wait_s
        """How long to wait before it, where somebody knows."""


class Unreachable(RetryableError, ConnectionError):
    """The connection could not be made, or was lost."""


class ResponseTimeout(RetryableError, TimeoutError):
    """The connection stood, and nothing came over it in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How patient a client is."""

    max_retries: int = 5
    """How often a question is asked again."""
    wait_s: float = 0.5
    """Wait before the first retry; twice as long before each further one."""
    longest_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.wait_s < 0:
            raise ConfigError(f"max_retries={self.max_retries}, wait_s={self.wait_s}; neither can be negative.")

    def wait_before(self, retry: int) -> float:
        # Not all who were sent away at the same moment should come back at the same moment.
        return min(self.wait_s * 2**retry, self.longest_wait_s) * random.uniform(0.75, 1.25)

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns; after the last try, its failure and how often it was tried."""
        for attempt in range(self.max_retries + 1):
            try:
                return await ask()
            except RetryableError as busy:
                if attempt == self.max_retries:
                    raise EndpointError(f"{busy} It was asked {attempt + 1} times.", status=busy.status) from busy
                wait = self.wait_before(attempt) if busy.wait_s is None else min(busy.wait_s, self.longest_wait_s)
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


# uvicorn, under vLLM, hangs up on a connection that was idle for 5 s; one that hangs up as we write costs a retry.
_KEEP_IDLE_S = 4.0
_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back, whatever its status."""

    status: int
    data: bytes
    retry_after: str | None
    """The header of that name."""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSession:
    """What belongs to one event loop."""

    session: "aiohttp.ClientSession"
    life: AsyncGenerator["aiohttp.ClientSession", None]
    """Closing it closes the session."""
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """For what should be done once, by whoever comes first; by name."""


class HttpSessions:
    """Asks servers, from any event loop. `needed_for` is named where aiohttp is missing.

    `given` are the servers' URLs as the user wrote them, perhaps with logins; requests name them without (`without_login`), so
    that no message or record can show one.
    """

    def __init__(self, headers: Mapping[str, str] | None = None, *, needed_for: str, given: Sequence[str] = ()) -> None:
        self._headers = dict(headers or {})
        self._needed_for = needed_for
        own = {origin_of(url): login for url in given if (login := login_of(url)) is not None}
        self._logins = {} if "Authorization" in self._headers else {**known_logins(), **own}
        self._lanes: dict[asyncio.AbstractEventLoop, LoopSession] = {}

    async def ask(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """One question, one answer; `Unreachable` or `ResponseTimeout` where none came."""
        session = (await self.lane()).session
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        sent = {
            **({} if body is None else {"Content-Type": "application/json"}),
            **self.login_headers(url),
            **(headers or {}),
        }
        try:
            async with session.request(
                method, url, data=body, headers=sent, params=params, timeout=timeout
            ) as response:
                data = await response.read()
                return Answer(status=response.status, data=data, retry_after=response.headers.get("Retry-After"))
        except TimeoutError as error:
            raise ResponseTimeout(
                f"{url} cannot be reached: no answer within {timeout_s or _CONNECT_S:g} s."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{url} cannot be reached: {error or type(error).__name__}.") from error

    def login_headers(self, url: str) -> dict[str, str]:
        """What a request to this server has to say of who asks."""
        login = self._logins.get(origin_of(url)) if self._logins else None
        return {} if login is None else {"Authorization": login}

    async def lane(self) -> LoopSession:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._lanes:
            for other in [known for known in list(self._lanes) if known.is_closed()]:
                self._lanes.pop(other, None)
            life = self._session_life()
            self._lanes[loop] = LoopSession(session=await anext(life), life=life)
        return self._lanes[loop]

    async def close(self) -> None:
        """Close the running loop's session; those of other loops close with them."""
        lane = self._lanes.pop(asyncio.get_running_loop(), None)
        if lane is not None:
            await lane.life.aclose()

    async def _session_life(self) -> AsyncGenerator["aiohttp.ClientSession", None]:
        # A generator, because a loop that ends (asyncio.run) closes those that are still open.
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtra("endpoint", self._needed_for) from error
        # Whoever plays bounds how many episodes run, so no limit here: a request in a queue of ours looks like a slow server.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        async with aiohttp.ClientSession(connector=connector, headers=self._headers) as session:
            yield session


def error_of(data: str) -> dict[str, Any]:
    """The error object of OpenAI's API where there is one; else the beginning of whatever came, as its message."""
    import msgspec

    try:
        error = msgspec.json.decode(data)["error"]
        return {**error, "message": str(error["message"])}
    except (msgspec.DecodeError, KeyError, TypeError):
        return {"message": data.strip()[:300] or "(nothing)"}
