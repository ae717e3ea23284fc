"""Starting, killing and pausing the programs of pipeline_parts.py, and the one check that every fault has to pass."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from ludic_pipeline.queue.wire import UnreadableGroup, decode_group
from plugins.pipeline.tests.pipeline_parts import LearnerSettings, ids_of
from tests import forked
from tests.redis_fixtures import RedisServer, end_redis

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
"""For anything that a test waits for: seconds on a quiet machine."""
QUEUE_KEY = "faults"
BATCH_SIZE = LearnerSettings.batch_size
COUNTS = ("produced", "trained", "stale", "filtered", "dead")


@dataclass(frozen=True, kw_only=True)
class Life:
    """One process."""

    name: str
    process: "forked.Forked | subprocess.Popen[bytes]"
    record: Path
    log: Path

    def rows(self) -> list[dict[str, Any]]:
        """What it has written down; a line that a kill has torn was never finished."""
        if not self.record.exists():
            return []
        *lines, _ = self.record.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def told(self, what: str) -> list[Any]:
        return [row[what] for row in self.rows() if what in row]

    def ids(self, what: str) -> list[str]:
        return [id_ for ids in self.told(what) for id_ in ids]

    @property
    def step(self) -> int:
        """The last one that it has applied."""
        return max(self.told("applied"), default=0)


@dataclass(frozen=True, kw_only=True)
class Account:
    """What plain redis-py finds, and what the programs have written down."""

    counts: dict[str, int]
    in_queue: int
    """Items of all entries in the stream."""
    queued: list[str]
    dead_letters: list[str]
    learned: list[str]
    """In the weights that the last learner of each rank ended with."""
    left_out: list[str]
    """By those learners' steps."""
    kept: set[str]
    """Whose push Redis has acknowledged to an actor."""
    sent: set[str]

    def __str__(self) -> str:
        return f"{self.counts}, in queue {self.in_queue}"


class Pipeline:
    """A Redis, and the programs around it. It ends only processes that it has started."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.lives: list[Life] = []

    # --- starting and ending ---

    def start(self, program: str, *, environment: dict[str, str] | None = None, **settings: Any) -> Life:
        name = f"{len(self.lives):02d}_{program}"
        record, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        words = [
            "-m",
            "plugins.pipeline.tests.pipeline_parts",
            program,
            json.dumps({"record": str(record), **settings}),
        ]
        process = (
            self._begun(words, environment, log) if environment else forked.python(*words, cwd=self.folder, output=log)
        )
        life = Life(name=name, process=process, record=record, log=log)
        self.lives.append(life)
        return life

    def _begun(self, words: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """A fresh interpreter, for variables that it reads itself."""
        with log.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **environment},
            )

    def actor(self, *, environment: dict[str, str] | None = None, **settings: Any) -> Life:
        return self.start("actor", environment=environment, **{**self._meeting, **settings})

    def learner(self, **settings: Any) -> Life:
        return self.start("learner", **{**self._meeting, **settings})

    @property
    def _meeting(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "redis_url": self.server.url, "queue_key": QUEUE_KEY}

    def kill(self, life: Life) -> None:
        """As kill -9."""
        assert life.process.poll() is None, f"{life.name} has ended before it was killed:\n{self.shown(life)}"
        life.process.kill()
        life.process.wait()

    def stop(self, *lives: Life) -> None:
        """As its user or its launcher ends it; that has to go well."""
        for life in lives:
            self.until(lambda life=life: bool(life.rows()), f"{life.name} has begun", alive=(life,))
            life.process.send_signal(signal.SIGTERM)
        for life in lives:
            self.wait(life)

    def wait(self, life: Life) -> None:
        """Until it has ended by itself, well."""
        try:
            code = life.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{life.name} does not end:\n{self.shown(life)}") from None
        assert code == 0, f"{life.name} ended with {code}:\n{self.shown(life)}"

    def close(self) -> None:
        for life in self.lives:
            if life.process.poll() is None:
                life.process.kill()
                life.process.wait()

    # --- watching ---

    def until(self, condition: Callable[[], bool], what: str, *, alive: tuple[Life, ...] = ()) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for life in alive:
                assert life.process.poll() is None, f"{what}: {life.name} has ended:\n{self.shown(life)}"
            if time.monotonic() > deadline:
                shown = "\n".join(map(self.shown, self.lives))
                raise AssertionError(f"waited {PATIENCE_S:.0f} s: {what}\n{shown}")
            time.sleep(0.05)

    def until_step(self, learner: Life, step: int, *alive: Life) -> None:
        self.until(lambda: learner.step >= step, f"{learner.name} at step {step}", alive=(learner, *alive))

    def until_pushed(self, actor: Life, num_groups: int, *alive: Life) -> None:
        self.until(
            lambda: len(actor.told("kept")) >= num_groups, f"{num_groups} groups of {actor.name}", alive=(actor, *alive)
        )

    def until_held(self, learner: Life) -> None:
        self.until(lambda: bool(learner.told("held")), f"{learner.name} stands still", alive=(learner,))

    def until_drained(self, learner: Life) -> None:
        """The actors have ended: all that they pushed is trained on, but for what is less than a batch."""
        kept = {id_ for life in self.lives for id_ in life.ids("kept")}

        def used() -> set[str]:
            return {id_ for life in self.lives for what in ("trained", "filtered") for id_ in life.ids(what)}

        self.until(lambda: len(kept - used()) < BATCH_SIZE, "the queue is used up", alive=(learner,))

    def shown(self, life: Life) -> str:
        text = life.log.read_text(errors="replace")[-3000:] if life.log.exists() else ""
        return (
            f"--- {life.name} ({life.process.poll()}), step {life.step}, {len(life.told('kept'))} groups kept\n{text}"
        )

    # --- the account ---

    def redis(self) -> "redis.Redis":
        return redis.Redis.from_url(self.server.url, socket_timeout=PATIENCE_S)

    def count(self, name: str) -> int:
        with self.redis() as client:
            return int(client.hget(f"{{{QUEUE_KEY}}}:counts", name) or 0)

    def num_waiting_groups(self) -> int:
        with self.redis() as client:
            pending = client.xpending(f"{{{QUEUE_KEY}}}", "learners")["pending"]
            return client.xlen(f"{{{QUEUE_KEY}}}") - pending

    def account(self, queue_key: str = QUEUE_KEY) -> Account:
        with self.redis() as client:
            stream = f"{{{queue_key}}}"
            counts = {name: int(client.hget(f"{stream}:counts", name) or 0) for name in COUNTS}
            entries = client.xrange(stream)
            payloads = [client.get(f"{stream}:payload:{id_.decode()}") for id_, _ in entries]
            dead_letters = [fields[b"payload"] for _, fields in client.xrange(f"{stream}:dead")]
            names = {name.decode() for kind in ("payload", "arriving") for name in client.keys(f"{stream}:{kind}:*")}
        assert names == {f"{stream}:payload:{id_.decode()}" for id_, _ in entries}, "payloads without an entry, or none"
        queued = [ids_of(decode_group(payload)) for payload in payloads]
        assert [len(ids) for ids in queued] == [int(fields[b"n"]) for _, fields in entries]
        lineages = [self._lineage(rank, lives) for rank, lives in self.learners().items()]
        return Account(
            counts=counts,
            in_queue=sum(int(fields[b"n"]) for _, fields in entries),
            queued=[id_ for ids in queued for id_ in ids],
            dead_letters=[id_ for payload in dead_letters for id_ in readable_ids(payload)],
            learned=[id_ for line in lineages for step in line for id_ in step["trained"]],
            left_out=[id_ for line in lineages for step in line for id_ in step["filtered"]],
            kept={id_ for life in self.lives for id_ in life.ids("kept")},
            sent={id_ for life in self.lives for id_ in life.ids("sent")},
        )

    def learners(self) -> dict[int, list[Life]]:
        """The lives of each rank, in their order."""
        ranks: dict[int, list[Life]] = {}
        for life in self.lives:
            if life.told("resumed") or life.told("applied"):
                ranks.setdefault(next(iter(life.told("rank")), 0), []).append(life)
        return ranks

    def _lineage(self, rank: int, lives: list[Life]) -> list[dict[str, Any]]:
        """What the records say is what the checkpoint has, where it can be read."""
        steps = lineage(lives)
        checkpoint = self.folder / f"checkpoint_{rank}.json"
        if checkpoint.exists():
            assert json.loads(checkpoint.read_text())["trained"] == [id_ for step in steps for id_ in step["trained"]]
        return steps

    def check(self, queue_key: str = QUEUE_KEY) -> Account:
        """All that has to hold when all processes have ended, whatever was killed before:

        the counts add up, to what can be counted in Redis by hand; nothing that Redis acknowledged to an actor is lost; no
        learner's life has applied an item twice, nor have two; nothing is in the weights and in the queue.
        """
        account = self.account(queue_key)
        counts = account.counts
        assert counts["produced"] == sum(counts[name] for name in COUNTS[1:]) + account.in_queue, str(account)
        assert counts["trained"] == len(account.learned), "what is in the weights is what is called trained"
        assert counts["filtered"] == len(account.left_out), str(account)
        for life in self.lives:
            assert not twice(life.ids("trained") + life.ids("filtered")), f"{life.name} was given an item twice"
        where = Counter([*account.learned, *account.left_out, *account.queued, *account.dead_letters])
        assert not twice(list(where.elements())), "an item is in two places"
        lost = account.kept - where.keys()
        # No process records which items were stale; their number is what remains.
        num_gone = len(account.sent - where.keys())
        assert len(lost) <= counts["stale"] <= num_gone, f"{len(lost)} to {num_gone} items are gone: {account}"
        assert where.keys() <= account.sent, "there is something that no actor has sent"
        return account


def lineage(lives: list[Life]) -> list[dict[str, Any]]:
    """The steps that are in the last life's weights: a life goes on from its checkpoint, and what came after it is undone."""
    steps: list[dict[str, Any]] = []
    for life in lives:
        first = next((row["applied"] for row in life.rows() if "applied" in row), None)
        resumed = next(iter(life.told("resumed")), None)
        begins_after = resumed if resumed is not None else (first - 1 if first is not None else len(steps))
        steps = [step for step in steps if step["applied"] <= begins_after]
        steps += [row for row in life.rows() if "applied" in row]
    assert [step["applied"] for step in steps] == list(range(1, len(steps) + 1)), "a step is missing"
    return steps


def twice(ids: list[str]) -> list[str]:
    return [id_ for id_, number in Counter(ids).items() if number > 1]


def readable_ids(payload: bytes) -> list[str]:
    """Of a dead letter; those that no actor of ours has written have none."""
    try:
        return [id_ for item in decode_group(payload) if (id_ := item.origin.rollout_id) is not None]
    except UnreadableGroup:
        return []


class Network:
    """A way to Redis that can stand still (what is sent meanwhile arrives later, and no side is told) and lose replies, each time
    with the connection: then neither side can know whether Redis has done what it was asked to."""

    def __init__(self, server: RedisServer) -> None:
        self._target, path = str(server.socket), server.folder / "network.sock"
        self.url = f"unix://{path}"
        self.share_lost = 0.0
        """Of the replies."""
        self.num_lost = 0
        self._dice = random.Random(0)
        self._flows = threading.Event()
        self._flows.set()
        self._ends: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def pause(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self.resume()
        for end in (self._listening, *self._ends):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:  # closed
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._target)
            except OSError:  # Redis is away
                near.close()
                continue
            self._ends += [near, far]
            for source, sink, is_reply in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._forward, args=(source, sink, is_reply), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flows.wait()
                if is_reply and self._dice.random() < self.share_lost:
                    self.num_lost += 1
                    break
                sink.sendall(data)
        except OSError:  # one of both has gone
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def skewed_clock(folder: Path, *, ahead_s: float, jumps_s: float = 0.0) -> dict[str, str]:
    """The environment of a process whose clocks are wrong, and whose wall clock jumps with every look at it."""
    place = folder / f"skew_{ahead_s:.0f}"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import random, time\n"
        "true_time, true_monotonic = time.time, time.monotonic\n"
        f"time.time = lambda: true_time() + {ahead_s} + random.uniform(-{jumps_s}, {jumps_s})\n"
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
        f"time.monotonic = lambda: true_monotonic() + {abs(ahead_s)}\n"
    )
    paths = [str(place), str(ROOT / "src"), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def pipeline_on(server: RedisServer, folder: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(server, folder)
    yield pipeline
    pipeline.close()


def counted_by_hand(run: Path) -> tuple[dict[str, int], int]:
    """Counts and items in the queue, from the files that a launched run's own Redis has left."""
    place = Path(tempfile.mkdtemp(prefix="ludic-redis-"))
    shutil.copytree(run / "redis" / "appendonlydir", place / "appendonlydir")
    server = RedisServer(place).start()
    try:
        with redis.Redis.from_url(server.url) as client:
            stream = "{ludic:run}"
            counts = {name: int(client.hget(f"{stream}:counts", name) or 0) for name in COUNTS}
            return counts, sum(int(fields[b"n"]) for _, fields in client.xrange(stream))
    finally:
        end_redis(server)
