"""Turns of the training worker: order within a run, shared batches, fair shares, and failures that stay with their request."""

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ludic.types import ConfigError
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.losses import Row
from ludic_tinker.server.runs import PassJob, PassOutput
from ludic_tinker.server.scheduler import FairShares, PassTask, Scheduler, Task, UnreadPass

BUDGET = 100


class Recorded:
    """A stand-in for `TrainingBase.compute` that notes each batch: (run, tokens of its rows). `gate` holds it back."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, list[int]]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.failing: set[str] = set()

    def __call__(self, jobs: Sequence[PassJob]) -> list[PassOutput | Exception]:
        self.begun.set()
        assert self.gate.wait(60)
        self.batches.append([(job.run.name, [len(row.tokens) for row in job.rows]) for job in jobs])
        return [
            ConfigError(f"{job.run.name} is broken")
            if job.run.name in self.failing
            else PassOutput([np.zeros(len(row.tokens), np.float32) for row in job.rows], {"loss:sum": 1.0})
            for job in jobs
        ]


class Bench:
    """A scheduler, and the results in the order in which they come."""

    def __init__(self) -> None:
        self.compute = Recorded()
        self.scheduler = Scheduler(self.compute, token_budget=BUDGET)
        self.results: queue.Queue[tuple[str, int, Result]] = queue.Queue()
        self.broken: list[str] = []

    def open(self, *runs: str) -> None:
        """A run is named `tenant/run`."""
        for run in runs:
            self.scheduler.open(run, run.split("/")[0], next_number=1)

    def _settings(self, run: str, number: int) -> dict[str, Any]:
        def done(result: Result) -> None:
            self.results.put((run, number, result))

        return {"run": run, "tenant": run.split("/")[0], "number": number, "done": done}

    def step(self, run: str, number: int, work: Callable[[], Result] = dict) -> None:
        self.scheduler.submit(Task(**self._settings(run, number), work=work))

    def rows(self, run: str, number: int, *lengths: int, forward_only: bool = False) -> None:
        rows = [Row(np.zeros(n, np.int32), np.zeros(n, np.int64), {}) for n in lengths]
        name: Any = SimpleNamespace(name=run)
        self.scheduler.submit(
            PassTask(
                **self._settings(run, number),
                training=lambda: name,
                rows=rows,
                loss="",
                config={},
                forward_only=forward_only,
                finish=lambda outputs: {"rows": sum(len(own.logprobs) for own in outputs)},
                broken=lambda: self.broken.append(run),
            )
        )

    def wait(self, count: int) -> list[tuple[str, int, Result]]:
        return [self.results.get(timeout=60) for _ in range(count)]

    def hold(self) -> None:
        """The worker is in a batch until `release`, while requests arrive."""
        self.compute.gate.clear()
        self.compute.begun.clear()
        self.open("holder/0")
        self.rows("holder/0", 1, 1)
        assert self.compute.begun.wait(60)

    def release(self) -> None:
        self.compute.gate.set()
        assert self.wait(1)[0][0] == "holder/0"
        del self.compute.batches[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.compute.gate.set()
    made.scheduler.close()


def test_requests_of_a_run_are_carried_out_in_the_order_of_their_numbers(bench):
    bench.open("a/0")
    numbers = list(range(1, 21))
    random.Random(0).shuffle(numbers)
    done: list[int] = []
    for number in numbers:
        bench.step("a/0", number, lambda number=number: done.append(number) or {})
    assert [number for _, number, _ in bench.wait(20)] == done == list(range(1, 21))


def test_a_run_is_made_before_its_first_request(bench):
    """Also one that is opened while the worker makes another."""
    order: list[str] = []

    def make_first() -> None:
        bench.scheduler.open("b/0", "b", next_number=1, make=lambda: order.append("make b"))
        bench.step("b/0", 1, lambda: order.append("request b") or {})

    bench.scheduler.open("a/0", "a", next_number=1, make=make_first)
    bench.wait(1)
    assert order == ["make b", "request b"]


def test_rows_of_several_tenants_share_one_batch(bench):
    bench.open("a/0", "b/0", "c/0")
    bench.hold()
    for run in ("a/0", "b/0", "c/0"):
        bench.rows(run, 1, 10, 20)
    bench.release()
    bench.wait(3)
    assert len(bench.compute.batches) == 1
    assert dict(bench.compute.batches[0]) == {"a/0": [10, 20], "b/0": [10, 20], "c/0": [10, 20]}


def test_a_step_divides_the_passes_of_its_run(bench):
    bench.open("a/0")
    bench.hold()
    bench.rows("a/0", 1, 10)
    bench.rows("a/0", 2, 10)
    bench.step("a/0", 3)
    bench.rows("a/0", 4, 10)
    bench.release()
    assert [number for _, number, _ in bench.wait(4)] == [1, 2, 3, 4]
    assert bench.compute.batches == [[("a/0", [10]), ("a/0", [10])], [("a/0", [10])]]


def test_a_large_request_delays_another_tenant_by_one_batch(bench):
    bench.open("large/0", "small/0")
    bench.rows("large/0", 1, *[50] * 40)
    bench.hold()
    bench.rows("small/0", 1, 30)
    before = len(bench.compute.batches)
    bench.compute.gate.set()
    order = [run for run, _, _ in bench.wait(3)]
    assert order.index("small/0") < order.index("large/0")
    with_small = next(i for i, batch in enumerate(bench.compute.batches) if ("small/0", [30]) in batch)
    assert with_small <= before + 2, "one batch was being computed, and one may have been taken"
    rows = sum(len(own) for batch in bench.compute.batches for run, own in batch if run == "large/0")
    assert rows == 40 and max(_tokens(batch) for batch in bench.compute.batches) <= BUDGET


def test_a_row_longer_than_the_budget_is_a_batch_of_one(bench):
    bench.open("a/0", "b/0")
    bench.hold()
    bench.rows("a/0", 1, 3 * BUDGET)
    bench.rows("b/0", 1, 10)
    bench.release()
    bench.wait(2)
    assert sorted(_tokens(batch) for batch in bench.compute.batches) == [10, 3 * BUDGET]


@pytest.mark.parametrize("seed", range(5))
def test_backlogged_tenants_get_equal_tokens(bench, seed):
    """Whatever the sizes of their rows, two tenants that always have work differ by a row and a batch at most."""
    rng = random.Random(seed)
    sizes = {"a": (1, 5), "b": (20, 60), "c": (90, BUDGET)}
    bench.hold()
    for tenant, (low, high) in sizes.items():
        bench.open(f"{tenant}/0", f"{tenant}/1")
        for run in (f"{tenant}/0", f"{tenant}/1"):
            bench.rows(run, 1, *[rng.randint(low, high) for _ in range(4000 // (low + high))])
    bench.release()
    bench.wait(6)
    totals = {
        tenant: sum(_tokens([p]) for b in bench.compute.batches for p in b if p[0][0] == tenant) for tenant in sizes
    }
    given: Counter[str] = Counter()
    for batch in bench.compute.batches:
        for run, own in batch:
            given[run[0]] += sum(own)
        if all(given[tenant] < totals[tenant] - BUDGET for tenant in sizes):
            assert max(given.values()) - min(given[tenant] for tenant in sizes) <= 2 * BUDGET


def test_at_most_a_batch_of_a_run_is_read_ahead(bench):
    """What is unread is bytes, what is read may be a hundred times as large."""
    held, ended = list[int](), list[int]()

    def submit(number: int) -> None:
        settings = bench._settings("a/0", number)
        put = settings["done"]
        settings["done"] = lambda result: (ended.append(number), put(result))

        def read() -> Task:
            held.append(number - len(ended))
            row = Row(np.zeros(BUDGET, np.int32), np.zeros(BUDGET, np.int64), {})
            run: Any = SimpleNamespace(name="a/0")
            own = {"training": lambda: run, "rows": [row], "loss": "", "config": {}, "forward_only": False}
            return PassTask(**settings, **own, finish=lambda outputs: {})

        bench.scheduler.submit(UnreadPass(**settings, read=read))

    bench.hold()
    bench.open("a/0")
    for number in range(1, 6):
        submit(number)
    bench.release()
    assert [number for _, number, _ in bench.wait(5)] == [1, 2, 3, 4, 5]
    assert held == [1] * 5


def test_idle_time_gives_no_credit():
    shares = FairShares()
    for _ in range(10):
        shares.charge("busy", 100)
    turns = []
    for _ in range(6):
        turns.append(shares.choose(["busy", "late"]))
        shares.charge(turns[-1], 100)
    assert Counter(turns) == {"busy": 3, "late": 3}


def test_a_failure_is_that_of_one_request(bench):
    bench.open("good/0", "bad/0")
    bench.compute.failing.add("bad/0")
    bench.hold()
    bench.rows("good/0", 1, 10)
    bench.rows("bad/0", 1, 10)
    bench.step("bad/0", 2, lambda: 1 / 0)
    bench.step("bad/0", 3)
    bench.release()
    results = {(run, number): result for run, number, result in bench.wait(4)}
    assert results["good/0", 1] == {"rows": 1} and results["bad/0", 3] == {}
    assert results["bad/0", 1] == Failure("bad/0 is broken") and bench.broken == []
    crashed = results["bad/0", 2]
    assert isinstance(crashed, Failure) and not crashed.is_users and "log" in crashed.message


def test_a_pass_that_fails_after_its_first_batch_says_so(bench):
    bench.open("a/0")
    bench.hold()
    bench.rows("a/0", 1, 60, 60)
    bench.compute.batches.append([])
    original = bench.compute.__call__

    bench.scheduler._compute = lambda jobs: (
        [ConfigError("broken")]
        if any(run == "a/0" for batch in bench.compute.batches for run, _ in batch)
        else original(jobs)
    )
    bench.compute.gate.set()
    failed = {run: result for run, _, result in bench.wait(2)}
    assert failed["a/0"] == Failure("broken") and bench.broken == ["a/0"]


def test_requests_that_wait_fail_when_their_run_ends(bench):
    bench.open("a/0")
    bench.step("a/0", 2)
    bench.scheduler.close_run("a/0")
    assert bench.wait(1) == [("a/0", 2, Failure("The training run has ended."))]


def _tokens(batch: list[tuple[str, list[int]]]) -> int:
    return sum(sum(own) for _, own in batch)
