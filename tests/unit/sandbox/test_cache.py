import threading

import pytest

from ludic.sandbox import LRUCache
from ludic.types import ConfigError


def test_the_least_recently_used_entry_is_dropped():
    cache: LRUCache[str, int] = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_writing_an_entry_again_renews_it():
    cache: LRUCache[str, int] = LRUCache(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        cache.put(key, value)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (3, None, 4)


def test_clearing_keeps_the_counters():
    cache: LRUCache[str, int] = LRUCache(2)
    assert cache.hit_rate == 0.0
    cache.put("a", 1)
    cache.get("a")
    cache.get("b")
    cache.clear()
    assert cache.stats == {"hits": 1, "misses": 1, "size": 0, "max_size": 2} and cache.hit_rate == 0.5


def test_a_cache_of_size_zero_is_always_empty():
    cache: LRUCache[str, int] = LRUCache(0)
    cache.put("a", 1)
    assert cache.get("a") is None
    with pytest.raises(ConfigError, match="max_size=-1"):
        LRUCache(-1)


def test_threads_do_not_lose_counts():
    cache: LRUCache[int, int] = LRUCache(50)

    def use() -> None:
        for n in range(2000):
            cache.put(n % 100, n)
            cache.get(n % 70)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats
    assert stats["hits"] + stats["misses"] == 8000 and stats["size"] == 50
