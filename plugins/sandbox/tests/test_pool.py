import asyncio
import threading

import pytest

from ludic.types import ConfigError
from ludic_sandbox import BaseSandboxPool, LRUCache, SandboxError, SandboxPoolExhaustedError


class FakeSandbox:
    """Fails its resets as often as its pool's script says."""

    python_version = "3.99"

    def __init__(self, pool: "FakePool") -> None:
        self.pool = pool
        self.num_resets = 0
        self.is_closed = False

    async def reset(self) -> None:
        self.num_resets += 1
        await asyncio.sleep(0)
        if self.pool.script and self.pool.script.pop(0):
            raise SandboxError("no space left.")

    async def close(self) -> None:
        self.is_closed = True


class FakePool(BaseSandboxPool):
    """`script`: for each reset to come, whether it fails."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.script: list[bool] = []
        self.made: list[FakeSandbox] = []

    async def _make_sandbox(self) -> FakeSandbox:
        self.made.append(FakeSandbox(self))
        return self.made[-1]


async def test_starting_twice_makes_the_sandboxes_once():
    async with FakePool(n_workers=3) as pool:
        await asyncio.gather(pool.start(), pool.start())
        assert len(pool.made) == 3 and pool.available == 3 and pool.python_version == "3.99"
    assert all(one.is_closed for one in pool.made)


async def test_a_released_sandbox_is_reset_before_the_next_checkout():
    async with FakePool(n_workers=1) as pool:
        first = await pool.checkout()
        await pool.release(first)
        assert pool.available == 0 and pool.pending_resets == 1
        assert await pool.checkout() is first and first.num_resets == 2


async def test_a_checkout_waits_for_a_release_until_its_timeout():
    async with FakePool(n_workers=1) as pool:
        first = await pool.checkout()
        with pytest.raises(TimeoutError, match="all 1 are in use"):
            await pool.checkout(timeout_s=0.01)
        waiting = asyncio.create_task(pool.checkout(timeout_s=60))
        await pool.release(first)
        assert await waiting is first


async def test_a_cancelled_checkout_loses_no_sandbox():
    async with FakePool(n_workers=1) as pool:
        first = await pool.checkout()
        waiting = asyncio.create_task(pool.checkout())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pool.release(first)
        assert await pool.checkout(timeout_s=60) is first


async def test_a_sandbox_is_given_back_once_and_to_its_own_pool():
    async with FakePool(n_workers=1) as pool, FakePool(n_workers=1) as other:
        sandbox = await pool.checkout()
        with pytest.raises(ConfigError, match="not checked out of this pool"):
            await other.release(sandbox)
        await pool.release(sandbox)
        with pytest.raises(ConfigError, match="not checked out of this pool"):
            await pool.release(sandbox)


async def test_a_sandbox_that_cannot_be_reset_is_replaced():
    async with FakePool(n_workers=1) as pool:
        first = await pool.checkout()
        pool.script = [True]
        await pool.release(first)
        second = await pool.checkout()
        assert second is not first and first.is_closed and not second.is_closed


async def test_the_pool_counts_consecutive_failures_only():
    async with FakePool(n_workers=1, max_consecutive_failures=2) as pool:
        for _ in range(5):
            pool.script = [True, False]  # its own reset fails, its replacement's does not
            await pool.release(await pool.checkout())
            await pool.drain_pending_resets()
        assert pool.available == 1


async def test_simultaneous_failures_with_successful_replacements_do_not_stop_the_pool():
    async with FakePool(n_workers=8, max_consecutive_failures=5) as pool:
        lent = [await pool.checkout() for _ in range(8)]
        pool.script = [True] * 6
        for sandbox in lent:
            await pool.release(sandbox)
        await pool.drain_pending_resets()
        assert pool.available == 8 and not pool.has_given_up


async def test_a_checkout_during_the_start_waits_for_its_end():
    pool = FakePool(n_workers=1)
    starting = asyncio.create_task(pool.start())
    await asyncio.sleep(0)
    assert await pool.checkout(timeout_s=60) is pool.made[0]
    await starting
    await pool.shutdown()


async def test_a_start_that_was_cancelled_leaves_nothing_and_can_be_repeated():
    pool = FakePool(n_workers=2)
    starting = asyncio.create_task(pool.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(one.is_closed for one in pool.made)
    async with pool:
        assert pool.available == 2


async def test_a_release_during_shutdown_is_ignored():
    class Slow(FakeSandbox):
        async def close(self) -> None:
            await asyncio.sleep(0.01)
            await super().close()

    class SlowPool(FakePool):
        async def _make_sandbox(self) -> FakeSandbox:
            self.made.append(Slow(self))
            return self.made[-1]

    pool = SlowPool(n_workers=1)
    await pool.start()
    sandbox = await pool.checkout()
    ending = asyncio.create_task(pool.shutdown())
    await asyncio.sleep(0.005)
    await pool.release(sandbox)
    await ending
    assert sandbox.is_closed


async def test_a_broken_pool_tells_everyone_who_asks_and_everyone_who_waits():
    async with FakePool(n_workers=1, max_consecutive_failures=3) as pool:
        sandbox = await pool.checkout()
        waiting = [asyncio.create_task(pool.checkout()) for _ in range(2)]
        await asyncio.sleep(0)
        pool.script = [True] * 10
        await pool.release(sandbox)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, SandboxPoolExhaustedError)
            assert "3 new sandboxes in a row failed" in str(error) and "no space left." in str(error)
        with pytest.raises(SandboxPoolExhaustedError):
            await pool.checkout()


async def test_a_broken_pool_can_be_started_again():
    pool = FakePool(n_workers=1, max_consecutive_failures=1)
    await pool.start()
    pool.script = [True, True]
    await pool.release(await pool.checkout())
    with pytest.raises(SandboxPoolExhaustedError):
        await pool.checkout()
    await pool.shutdown()
    async with pool:
        assert await pool.checkout()


async def test_without_replacement_the_pool_shrinks_and_then_raises():
    async with FakePool(n_workers=2, auto_replace_failed=False) as pool:
        one, other = await pool.checkout(), await pool.checkout()
        pool.script = [True, True]
        await pool.release(one)
        await pool.drain_pending_resets()
        assert len(pool.made) == 2
        await pool.release(other)
        with pytest.raises(SandboxPoolExhaustedError, match="auto_replace_failed is off"):
            await pool.checkout()


async def test_an_unexpected_error_in_the_background_reaches_the_next_caller():
    class Odd(FakePool):
        async def _make_sandbox(self) -> FakeSandbox:
            sandbox = await super()._make_sandbox()
            if len(self.made) > 1:
                raise ZeroDivisionError("a bug")
            return sandbox

    async with Odd(n_workers=1) as pool:
        sandbox = await pool.checkout()
        pool.script = [True]
        await pool.release(sandbox)
        with pytest.raises(SandboxPoolExhaustedError, match="ZeroDivisionError: a bug"):
            await pool.checkout(timeout_s=60)


async def test_a_pool_that_cannot_start_says_why_and_keeps_nothing():
    pool = FakePool(n_workers=3)
    pool.script = [False, True, False]
    with pytest.raises(SandboxError, match="no space left"):
        await pool.start()
    assert all(one.is_closed for one in pool.made)
    await pool.start()
    assert pool.available == 3
    await pool.shutdown()


async def test_shutdown_closes_lent_sandboxes_and_can_be_called_again():
    pool = FakePool(n_workers=2)
    await pool.start()
    lent = await pool.checkout()
    await pool.shutdown()
    await pool.shutdown()
    assert lent.is_closed
    await pool.release(lent)  # its holder may still release it
    with pytest.raises(SandboxError, match="shut down"):
        await pool.checkout()


async def test_a_pool_must_be_started_before_it_is_used():
    with pytest.raises(ConfigError, match="not been started"):
        await FakePool().checkout()


def test_a_pool_belongs_to_its_loop():
    pool = FakePool(n_workers=1)
    with asyncio.Runner() as runner:
        runner.run(pool.start())
        errors: list[BaseException] = []

        def elsewhere() -> None:
            with pytest.raises(ConfigError, match="another event loop") as caught:
                asyncio.run(pool.checkout())
            errors.append(caught.value)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(errors) == 1
        runner.run(pool.shutdown())


async def test_concurrent_resets_are_limited():
    class Counting(FakeSandbox):
        running = most = 0

        async def reset(self) -> None:
            Counting.running += 1
            Counting.most = max(Counting.most, Counting.running)
            await asyncio.sleep(0.01)
            Counting.running -= 1

    class CountingPool(FakePool):
        async def _make_sandbox(self) -> FakeSandbox:
            return Counting(self)

    async with CountingPool(n_workers=6, max_concurrent_ops=2) as pool:
        lent = [await pool.checkout() for _ in range(6)]
        Counting.most = 0
        for sandbox in lent:
            await pool.release(sandbox)
        await pool.drain_pending_resets()
        assert Counting.most == 2 and pool.available == 6


@pytest.mark.parametrize("name", ["n_workers", "max_consecutive_failures", "max_concurrent_ops"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        FakePool(**{name: 0})


async def test_results_are_kept_by_code_and_tests():
    pool = FakePool(cache_size=2)
    assert pool.get_cached("code", "tests") is None
    pool.put_cached("code", "tests", "result")
    assert pool.get_cached("code", "tests") == "result" and pool.get_cached("code", "other tests") is None
    assert pool.cache_stats == {"hits": 1, "misses": 2, "size": 1, "max_size": 2}


# --- the cache of results ---


@pytest.mark.parametrize(
    ("used", "found"),
    [
        ([("a", 1), ("b", 2), "a", ("c", 3)], (1, None, 3)),  # reading renews an entry
        ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], (3, None, 4)),  # and so does writing it again
    ],
)
def test_the_least_recently_used_entry_is_dropped(used, found):
    cache: LRUCache[str, int] = LRUCache(2)
    for one in used:
        cache.get(one) if isinstance(one, str) else cache.put(*one)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == found


def test_clearing_keeps_the_counters_and_size_zero_keeps_nothing():
    cache: LRUCache[str, int] = LRUCache(2)
    assert cache.hit_rate == 0.0
    cache.put("a", 1)
    cache.get("a")
    cache.get("b")
    cache.clear()
    assert cache.stats == {"hits": 1, "misses": 1, "size": 0, "max_size": 2} and cache.hit_rate == 0.5
    cache = LRUCache(0)
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
