"""HTTP for the clients in this package: retries, and one aiohttp session per event loop for thousands of requests.

A session belongs to the loop that created it, while a client may be used from several: a trainer's, an evaluator's, a
publisher's thread. So each loop gets a session on first use, which closes with the loop. Cancelling a request closes its
connection, so the server can stop working on it.
"""

import asyncio
import http.client
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ludic.types import ConfigError, LudicError, MissingExtra
from ludic.types.errors import retry_wait_s
from ludic.util.urls import known_logins, login_of, origin_of

if TYPE_CHECKING:
    import aiohttp
T = TypeVar("T")


class EndpointError(LudicError, RuntimeError):
    """A server did not respond, or refused the request."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status, if a response came."""


class RetryableError(EndpointError):
    """The request is valid and may succeed if it is sent again."""

    def __init__(self, message: str, *, status: int | None = None, wait_s: float | None = None) -> None:
        super().__init__(message, status=status)
        self.wait_s = wait_s
        """Seconds to wait before the retry, if the server says so."""


class Unreachable(RetryableError, ConnectionError):
    """The connection could not be made, or was lost."""


class ResponseTimeout(RetryableError, TimeoutError):
    """The server is connected but did not respond in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """Retry policy of a client: exponential back-off with jitter."""

    max_retries: int = 5
    """Retries after the first attempt."""
    wait_s: float = 0.5
    """Wait before the first retry; twice as long before each further one."""
    longest_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.wait_s < 0:
            raise ConfigError(f"max_retries={self.max_retries}, wait_s={self.wait_s}; neither can be negative.")

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`; after the last attempt, its failure with the number of attempts."""
        for attempt in range(self.max_retries + 1):
            try:
                return await ask()
            except RetryableError as busy:
                if attempt == self.max_retries:
                    raise EndpointError(f"{busy} It was tried {attempt + 1} times.", status=busy.status) from busy
                wait_s = retry_wait_s(attempt, self.wait_s, self.longest_wait_s)
                await asyncio.sleep(wait_s if busy.wait_s is None else min(busy.wait_s, self.longest_wait_s))
        raise AssertionError("the last attempt returns or raises")


# uvicorn, under vLLM, closes a connection after 5 s of idling; if it closes while a request is written, that costs a retry.
_KEEP_IDLE_S = 4.0
_CONNECT_S = 10.0
_BUFFER = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A response with any status."""

    status: int
    data: bytes
    retry_after: str | None
    """The Retry-After header."""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoopSession:
    """The session and locks of one event loop."""

    session: "aiohttp.ClientSession"
    life: AsyncGenerator["aiohttp.ClientSession", None]
    """Closing it closes the session."""
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Locks by name, for work that only the first caller does."""


class HttpSessions:
    """Sends requests from any event loop. `needed_for` names the feature if aiohttp is missing.

    `given` holds the servers' URLs as the user wrote them, possibly with logins, which an API key replaces; requests use URLs
    without them (`without_login`), so that no message or record can show one.
    """

    def __init__(self, given: Sequence[str], api_key: str | None, *, needed_for: str) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._needed_for = needed_for
        own = {origin_of(url): login for url in given if (login := login_of(url)) is not None}
        self._logins = {**known_logins(), **own} if api_key is None else {}
        self._by_loop: dict[asyncio.AbstractEventLoop, _LoopSession] = {}

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
        """Send one request; `Unreachable` or `ResponseTimeout` if there is no response."""
        try:
            async with self._request(method, url, body, headers, params, timeout_s) as response:
                data = await response.read()
                return Answer(status=response.status, data=data, retry_after=response.headers.get("Retry-After"))
        except TimeoutError as error:
            raise ResponseTimeout(
                f"{url} cannot be reached: no response within {timeout_s or _CONNECT_S:g} s."
            ) from error

    async def events(self, url: str, body: bytes) -> AsyncGenerator[bytes | Answer, None]:
        """The data of the server-sent events that answer a POST, without the closing [DONE]; one `Answer` if it is refused."""
        async with self._request("POST", url, body, None, None, None) as response:
            if response.status != 200:
                data = await response.read()
                yield Answer(status=response.status, data=data, retry_after=response.headers.get("Retry-After"))
                return
            async for line in response.content:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield data

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        params: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        session = (await self.for_loop()).session
        import aiohttp

        sent = {
            **({} if body is None else {"Content-Type": "application/json"}),
            **self.login_headers(url),
            **(headers or {}),
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            # Events may have long lines: every token's log-prob and text.
            async with session.request(
                method, url, data=body, headers=sent, params=params, timeout=timeout, read_bufsize=_BUFFER
            ) as response:
                yield response
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{url} cannot be reached: {error or type(error).__name__}.") from error

    def login_headers(self, url: str) -> dict[str, str]:
        """The Authorization header for this server, if a login is known."""
        login = self._logins.get(origin_of(url)) if self._logins else None
        return {} if login is None else {"Authorization": login}

    async def for_loop(self) -> _LoopSession:
        """The session of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for other in [known for known in list(self._by_loop) if known.is_closed()]:
                self._by_loop.pop(other, None)
            life = self._session_life()
            self._by_loop[loop] = _LoopSession(session=await anext(life), life=life)
        return self._by_loop[loop]

    async def close(self) -> None:
        """Close the running loop's session; other loops close theirs when they end."""
        session = self._by_loop.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.life.aclose()

    async def _session_life(self) -> AsyncGenerator["aiohttp.ClientSession", None]:
        # A generator, because a loop that ends (asyncio.run) closes open generators.
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtra("endpoint", self._needed_for) from error
        # No connection limit: the rollout engine bounds concurrent episodes, and a request queued here looks like a slow server.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        async with aiohttp.ClientSession(connector=connector, headers=self._headers) as session:
            yield session


def get_without_loop(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes:
    """One GET outside an event loop; OSError if there is no response, EndpointError for a refusal."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # like aiohttp: ignores the environment's proxies
    try:
        with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout_s) as response:
            data: bytes = response.read()
            return data
    except urllib.error.HTTPError as error:
        raise EndpointError(f"{url} returned {error.code}.", status=error.code) from error
    except http.client.HTTPException as error:
        raise Unreachable(f"{url} does not speak HTTP: {error or type(error).__name__}.") from error


def json_object(url: str, answer: Answer, problem: str) -> dict[str, Any]:
    """The response as a JSON object; a ConfigError with `problem` if it is none."""
    try:
        decoded = msgspec.json.decode(answer.data)
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise ConfigError(f"{url} {problem}; it returned {answer.text!r:.200}.")
    return decoded


def error_of(data: str) -> dict[str, Any]:
    """The error object of OpenAI's API if there is one; else the start of the response as its message."""
    try:
        error = msgspec.json.decode(data)["error"]
        return {**error, "message": str(error["message"])}
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return {"message": data.strip()[:300] or "(nothing)"}
