"""Small real parts for the queue's tests: groups and a learner's calls in short."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import redis

from ludic.types import SampleAttachments, SAWItem, VersionRun
from ludic_pipeline.queue.lease import LearnerStatus, Lease, LeaseTimes
from ludic_pipeline.queue.queue import START, ActorId, ExperienceQueue, Settlement, Taken
from ludic_pipeline.queue.source import PipelineBatchSource
from ludic_pipeline.queue.wire import encode_group
from tests.redis_fixtures import RedisServer

ACTOR = ActorId("actor-1")
SHORT = LeaseTimes(holds_s=0.5, beat_s=0.1)


def item(tag: int, version: int | None = 0) -> SAWItem:
    """`tag` is its first token: which item it is."""
    runs = () if version is None else (VersionRun(version, 1),)
    return SAWItem(
        input_ids=[tag, 7, 8],
        attention_mask=None,
        action_mask=[0, 0, 1],
        weight=1.0,
        attachments=SampleAttachments(version_runs=runs),
    )


def payload(tags: list[int], version: int | None = 0) -> bytes:
    return encode_group([item(tag, version) for tag in tags])


class Pusher:
    """An actor that numbers its groups and the items in them."""

    def __init__(self, queue: ExperienceQueue, actor: ActorId = ACTOR) -> None:
        self.queue, self.actor = queue, actor
        self.num_pushed = self.num_items = 0

    async def push(self, size: int = 2, version: int | None = 0) -> list[int]:
        """The tags of the new group's items; [] if the queue is full."""
        tags = [self.num_items + i for i in range(size)]
        accepted = await self.queue.push(
            self.actor, self.num_pushed + 1, payload(tags, version), num_items=size, oldest_version=version
        )
        if not accepted:
            return []
        self.num_pushed += 1
        self.num_items += size
        return tags


class Packed(NamedTuple):
    """A group to push."""

    sequence: int
    num_items: int = 1
    version: int | None = 0
    data: bytes = b"x"


async def push_many(queue: ExperienceQueue, groups: Sequence[Packed], actor: ActorId = ACTOR) -> int:
    """Push groups in order, until one is refused; returns how many are in the queue."""
    for number, group in enumerate(groups):
        sizes = {"num_items": group.num_items, "oldest_version": group.version}
        if not await queue.push(actor, group.sequence, group.data, **sizes):
            return number
    return len(groups)


def tags_of(batch) -> list[int]:
    return [int(item.input_ids[0]) for item in batch.items]


class Learner:
    """A learner's calls with the lease and the status filled in."""

    def __init__(self, queue: ExperienceQueue, rank: int = 0, **status) -> None:
        self.queue, self.lease = queue, Lease(f"learner-{rank}")
        self.status = LearnerStatus(**status)

    async def take(self, max_items: int = 1, *, cursor: str = "", held=()) -> Taken:
        return await self.queue.take(self.lease, self.status, max_items=max_items, cursor=cursor, held=held)

    async def take_again(self, max_items: int = 1, held=()) -> Taken:
        return await self.take(max_items, cursor=START, held=held)

    async def settle(self, *settlements: Settlement) -> int:
        return await self.queue.settle(self.lease, self.status, settlements)


async def crash(source: PipelineBatchSource) -> None:
    """A kill -9 as Redis sees it: nothing is acknowledged, the lease is not released."""
    if source._filling is not None:
        source._filling.cancel()
        await asyncio.gather(source._filling, return_exceptions=True)
    source._heartbeat.stop()
    await source._queue.close()


def let_lease_run_out(server: RedisServer, queue_key: str, name: str = "learner-0") -> None:
    """Set the time of the last heartbeat, if there was one, to long ago."""
    with raw_client(server) as client:
        lease = client.hget(f"{{{queue_key}}}:leases", name)
        if lease is not None:
            client.hset(f"{{{queue_key}}}:leases", name, lease.split()[0] + b" 1")


def raw_client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def payload_keys(client: redis.Redis, queue_key: str) -> list[bytes]:
    """Keys of the payloads in the queue, and of payloads that an interrupted push left behind."""
    return [name for kind in ("payload", "arriving") for name in client.keys(f"{{{queue_key}}}:{kind}:*")]


def kill_connections(server: RedisServer) -> int:
    """Kill the connections of all other clients."""
    with raw_client(server) as client:
        return client.client_kill_filter(_type="normal", skipme=True)
