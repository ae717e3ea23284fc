"""A cache that forgets what was not asked for the longest; safe to share between threads."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from ludic.types import ConfigError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """At most `max_size` entries; none at all for 0."""

    def __init__(self, max_size: int) -> None:
        if max_size < 0:
            raise ConfigError(f"LRUCache(max_size={max_size}), but a cache cannot hold fewer than 0 entries.")
        self._max_size = max_size
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._entries:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_size:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget the entries; hits and misses go on being counted."""
        with self._lock:
            self._entries.clear()

    @property
    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "hits": self._hits,
                "misses": self._misses,
                "size": len(self._entries),
                "max_size": self._max_size,
            }

    @property
    def hit_rate(self) -> float:
        """Of all lookups so far; 0 before the first."""
        stats = self.stats
        lookups = stats["hits"] + stats["misses"]
        return stats["hits"] / lookups if lookups else 0.0
