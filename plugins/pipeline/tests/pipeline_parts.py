"""Programs that a fault test starts and kills: an actor with a scripted policy, and a learner whose weights are the list of what
it was trained on.

    python -m plugins.pipeline.tests.pipeline_parts actor|learner SETTINGS_AS_JSON

Each life of each program has its own record (JSON lines): an actor's of what it sent and what Redis has acknowledged, a
learner's of what went into which step. A record outlives a kill -9; its last line may be torn.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.batch_gen import GRPORequestStrategy
from ludic.inference import ScriptedClient
from ludic.types import ChatResponse, Info, SAWBatch, SAWItem, TokenCompletionRequest
from ludic_pipeline.queue import actor as actor_module
from ludic_pipeline.queue.actor import ActorSettings, run_pipeline_actor
from ludic_pipeline.queue.lease import LeaseTimes
from ludic_pipeline.queue.queue import ActorId, ExperienceQueue
from ludic_pipeline.queue.source import PipelineBatchSource
from ludic_pipeline.queue.wire import decode_group
from tests.unit.batch_gen.parts import TotalReward, make_engine, request


class Record:
    """What one life did, one line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")


def ids_of(items: Sequence[SAWItem]) -> list[str]:
    return [item.origin.rollout_id for item in items]


# --- the actor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ActorLife:
    """One life of an actor."""

    record: str
    folder: str
    """Of the test; the learner publishes its version there."""
    redis_url: str
    queue_key: str
    group_size: int = 4
    concurrency: int = 8
    turns: int = 2
    """Of an episode."""
    turn_s: float = 0.02
    max_waiting: int = 1024


class VersionFile:
    """In the place of published weights: their version."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "version"

    def publish(self, version: int) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(str(version))
        with contextlib.suppress(
            FileNotFoundError
        ):  # this process was stopped here, and its successor has published since
            fresh.replace(self._path)

    def read(self) -> int:
        return int(self._path.read_text()) if self._path.exists() else 0


class PacedClient:
    """Says "inc" after a while, as the version that was published last."""

    def __init__(self, turn_s: float, published: VersionFile) -> None:
        self._turn_s, self._published = turn_s, published
        self._inner = ScriptedClient(lambda _: "<a>inc</a>")

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        self._inner.version = self._published.read()
        await asyncio.sleep(self._turn_s)
        return await self._inner.complete_tokens(request)

    def sync_weights(self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: Any = None) -> str:
        raise RuntimeError("a script has no weights")

    async def get_policy_version(self) -> int:
        return self._published.read()


def watch_pushes(record: Record) -> None:
    """The actor makes its queue itself; in this process it is one that writes down what it sends."""

    class WatchedQueue(ExperienceQueue):
        async def push(
            self, actor: ActorId, sequence: int, payload: bytes, *, num_items: int, oldest_version: int | None
        ) -> bool:
            ids = ids_of(decode_group(payload))
            record.write(sent=ids)
            accepted = await super().push(actor, sequence, payload, num_items=num_items, oldest_version=oldest_version)
            if accepted:
                record.write(kept=ids)
            return accepted

    actor_module.ExperienceQueue = WatchedQueue


async def act(settings: ActorLife) -> None:
    record = Record(Path(settings.record))
    watch_pushes(record)
    client = PacedClient(settings.turn_s, VersionFile(settings.folder))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    record.write(began=True)
    seeds = itertools.count(os.getpid() << 20)
    await run_pipeline_actor(
        make_engine(client),
        lambda: [request("counting", {"target": settings.turns}, env_seed=next(seeds))],
        TotalReward(),
        settings.redis_url,
        settings.queue_key,
        concurrency=settings.concurrency,
        client=client,
        settings=ActorSettings(
            strategy=GRPORequestStrategy(settings.group_size), max_waiting=settings.max_waiting, poll_s=0.02
        ),
        stop=stop,
    )


# --- the learner -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """One life of a learner."""

    record: str
    folder: str
    redis_url: str
    queue_key: str
    batch_size: int = 8
    """Of all ranks together."""
    steps: int | None = None
    """End after this step; None: when told to."""
    step_s: float = 0.02
    save_every: int = 3
    max_lag: int | None = None
    acknowledge: str = "saved"
    rank: int = 0
    world_size: int = 1
    lease_s: float = 1.5
    hold_at: int | None = None
    """At this step it stops moving, until it is killed."""
    hold_where: str = "in_step"
    """Or after_step (trained, not saved), or after_checkpoint (saved, not reported yet)."""
    filter_every: int = 0
    """Every so manieth item of a batch is left out of the step."""
    fatal: str | None = None
    """The process is killed in a step that has the item of this name."""


@dataclass(slots=True)
class Weights:
    """What was learned: exactly which items, in which order."""

    step: int
    trained: list[str]
    filtered: list[str]

    @classmethod
    def load(cls, path: Path) -> tuple["Weights", dict[str, Any] | None]:
        """With the source's state beside them; nothing learned where there is no checkpoint."""
        if not path.exists():
            return cls(0, [], []), None
        saved = json.loads(path.read_text())
        return cls(saved["step"], saved["trained"], saved["filtered"]), saved["source"]

    def save(self, path: Path, source: PipelineBatchSource) -> None:
        state = {"step": self.step, "trained": self.trained, "filtered": self.filtered, "source": source.state_dict()}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(path)


class Learner:
    """The Trainer's calls in the Trainer's order, around weights that are a list."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self.record = Record(Path(settings.record))
        self.checkpoint = Path(settings.folder) / f"checkpoint_{settings.rank}.json"
        self.published = VersionFile(settings.folder)
        self.stop = asyncio.Event()
        self.source = PipelineBatchSource(
            settings.redis_url,
            settings.queue_key,
            settings.batch_size,
            max_lag=settings.max_lag,
            acknowledge=settings.acknowledge,
            rank=settings.rank,
            world_size=settings.world_size,
            lease_times=LeaseTimes(holds_s=settings.lease_s, beat_s=settings.lease_s / 5),
        )
        self.weights, state = Weights.load(self.checkpoint)
        self.saved_step = self.weights.step
        if state is not None:
            self.source.load_state_dict(state)

    async def learn(self) -> None:
        self._publish(self.weights.step)
        self.source.notify_version(self.weights.step)
        self.record.write(resumed=self.weights.step, rank=self.settings.rank)
        async with self.source:
            while self.weights.step != self.settings.steps:
                batch = await self._next_batch()
                if batch is None:
                    break
                await self._step(batch)
                if self.weights.step % self.settings.save_every == 0:
                    await self._save()
            if self.saved_step != self.weights.step:
                await self._save()
        self.record.write(account=self.source.stats().identity())

    async def _next_batch(self) -> SAWBatch | None:
        """None when it was told to stop."""
        fetching, stopped = asyncio.create_task(self.source.next_batch()), asyncio.create_task(self.stop.wait())
        await asyncio.wait([fetching, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if fetching.done():
            return fetching.result()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        return None

    async def _step(self, batch: SAWBatch) -> None:
        ids, step, every = ids_of(batch.items), self.weights.step + 1, self.settings.filter_every
        left_out = [id_ for number, id_ in enumerate(ids, start=1) if every and number % every == 0]
        trained = [id_ for id_ in ids if id_ not in left_out]
        self.record.write(begun=step, lags=batch.meta["lags"])
        await self._hold_if_due("in_step", step)
        await asyncio.sleep(self.settings.step_s)
        if self.settings.fatal in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        self.record.write(applied=step, trained=trained, filtered=left_out)
        self.weights.step = step
        self.weights.trained += trained
        self.weights.filtered += left_out
        self.source.notify_trained(step, len(trained))
        self._publish(step)
        self.source.notify_version(step)
        await self._hold_if_due("after_step", step)

    def _publish(self, step: int) -> None:
        """The first rank publishes, as in the Trainer. With two that did, the one ahead could publish last and both then wait for
        groups: no actor begins one with a version that the first rank, whose version counts, has not reached."""
        if self.settings.rank == 0:
            self.published.publish(step)

    async def _save(self) -> None:
        self.weights.save(self.checkpoint, self.source)
        await self._hold_if_due("after_checkpoint", self.weights.step)
        self.saved_step = self.weights.step
        self.source.notify_saved(self.weights.step)

    async def _hold_if_due(self, where: str, step: int) -> None:
        if step == self.settings.hold_at and where == self.settings.hold_where:
            self.record.write(held=step)
            await asyncio.Event().wait()


async def learn(settings: LearnerSettings) -> None:
    learner = Learner(settings)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, learner.stop.set)
    await learner.learn()


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    program, settings = sys.argv[1], json.loads(sys.argv[2])
    asyncio.run(act(ActorLife(**settings)) if program == "actor" else learn(LearnerSettings(**settings)))


if __name__ == "__main__":
    main()
