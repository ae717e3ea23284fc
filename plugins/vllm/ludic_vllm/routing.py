"""Routes requests over several servers behind one client.

A request goes to the least loaded server. But a server that has seen the beginning of a prompt has it in its prefix cache, so
the next turn of a conversation and the other samples of a group go to that server unless it is clearly busier than the
others. A server that failed is skipped for a while, longer each time.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ludic.http.client import RetryableError
from ludic.types import TokenArray
from ludic.types.errors import retry_wait_s

_BLOCK = 32
_MAX_BLOCKS = 200_000


class Aborted(RetryableError):
    """A healthy server aborted the request; its partial completion is discarded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Capabilities of a server, determined by its first request."""

    has_generate: bool
    """Started with --enable-scale-out: completions say which weights sampled which token."""
    gives_processed_logprobs: bool
    """Log-probs are those of the distribution that was sampled from (--logprobs-mode processed_logprobs)."""
    max_model_len: int | None
    """Limit of prompt and completion together; None if the server does not report it."""
    has_versions: bool
    """It answers GET /weight_info."""


@dataclass(slots=True, eq=False)
class Server:
    """The client's view of one server."""

    url: str
    facts: ServerFacts | None = None
    """None before the first request, and again after a failure: a restarted server may differ."""
    models: set[str] = field(default_factory=set)
    """Model names that it has served."""
    num_in_flight: int = 0
    num_failures: int = 0
    """Consecutive failures."""
    awake_at: float = field(default=0.0)
    """Skipped until this time (time.monotonic)."""


class ServerPool:
    """Routes requests; safe to use from several threads."""

    def __init__(self, urls: Sequence[str], *, rest_s: float = 1.0, longest_rest_s: float = 30.0) -> None:
        self.servers = [Server(url) for url in urls]
        self._rest_s = rest_s
        self._longest_rest_s = longest_rest_s
        self._seen = _SeenPrefixes()
        self._lock = threading.Lock()

    @contextmanager
    def lease(self, prompt: TokenArray) -> Iterator[Server]:
        """The server for this prompt; the request counts as in flight inside the context. A failure that can be retried is
        recorded, and retried at once if another server is available; an aborted request does not count as one."""
        with self._lock:
            server = self._choose(prompt)
            server.num_in_flight += 1
        try:
            yield server
        except Aborted:
            raise
        except RetryableError as busy:
            self.failed(server)
            if self.has_another(server):
                busy.wait_s = 0.0
            raise
        finally:
            with self._lock:
                server.num_in_flight -= 1

    def worked(self, server: Server, prompt: TokenArray, completion: TokenArray) -> None:
        """Record a response; the server's cache now holds prompt and completion."""
        with self._lock:
            server.num_failures, server.awake_at = 0, 0.0
            if len(self.servers) > 1:
                self._seen.add(np.concatenate([prompt, completion]), self.servers.index(server))

    def failed(self, server: Server) -> None:
        with self._lock:
            server.facts = None
            now = time.monotonic()
            if now < server.awake_at:  # its requests in flight fail together, as one failure
                return
            server.awake_at = now + retry_wait_s(server.num_failures, self._rest_s, self._longest_rest_s)
            server.num_failures += 1

    def has_another(self, server: Server) -> bool:
        """Return True if another server is available now."""
        now = time.monotonic()
        return any(other is not server and other.awake_at <= now for other in self.servers)

    def _choose(self, prompt: TokenArray) -> Server:
        if len(self.servers) == 1:
            return self.servers[0]
        now = time.monotonic()
        awake = [server for server in self.servers if server.awake_at <= now]
        if not awake:
            return min(self.servers, key=lambda server: server.awake_at)
        least = min(awake, key=lambda server: server.num_in_flight)
        holders = self._seen.find(prompt)
        warm = [server for server in awake if holders >> self.servers.index(server) & 1]
        chosen = min(warm, key=lambda server: server.num_in_flight, default=least)
        # A cached prefix is worth a short queue, not a long one.
        if chosen.num_in_flight > 4 + 1.25 * least.num_in_flight:
            chosen = least
        self._seen.add(prompt, self.servers.index(chosen))
        return chosen


class _SeenPrefixes:
    """The servers that have seen a prefix: a bitmask of servers per chained block of 32 tokens.

    Blocks chain as in a server's own prefix cache, so the lookup of a prompt ends at its first unknown block. The oldest blocks
    are dropped.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def add(self, tokens: TokenArray, server: int) -> None:
        for key in _chain(tokens):
            self._holders[key] = self._holders.pop(key, 0) | 1 << server  # re-inserted as the newest
        while len(self._holders) > _MAX_BLOCKS:
            del self._holders[next(iter(self._holders))]

    def find(self, tokens: TokenArray) -> int:
        """Bitmask of servers that hold the longest known prefix; 0 if no server holds one."""
        found = 0
        for key in _chain(tokens):
            holders = self._holders.get(key, 0)
            if not holders:
                break
            found = holders
        return found


def _chain(tokens: TokenArray) -> Iterator[int]:
    data, step, key = tokens.tobytes(), _BLOCK * tokens.itemsize, 0
    for start in range(0, len(data) - step + 1, step):
        key = hash((key, data[start : start + step]))
        yield key
