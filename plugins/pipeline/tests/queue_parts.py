"""Small real parts for the queue's tests: groups, a learner's calls in short, and a proxy that swallows a reply."""

import asyncio
import contextlib
from pathlib import Path

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


class LossyProxy:
    """Sits between a client and Redis; drops the reply to a script (or another command) that has run, and the connection."""

    def __init__(self, server: RedisServer, command: bytes = b"EVAL") -> None:
        self._command = command
        self._target, self._socket = server.socket, Path(server.folder) / "proxy.sock"
        self.url = f"unix://{self._socket}"
        self.num_to_lose = self.num_lost = 0

    async def __aenter__(self) -> "LossyProxy":
        self._serving: set[asyncio.Task] = set()
        self._listening = await asyncio.start_unix_server(self._serve, path=str(self._socket))
        return self

    async def __aexit__(self, *_) -> None:
        self._listening.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        to_redis_reader, to_redis = await asyncio.open_unix_connection(str(self._target))
        is_script = False

        async def forward() -> None:
            nonlocal is_script
            while data := await reader.read(1 << 20):
                is_script = is_script or self._command in data
                to_redis.write(data)
                await to_redis.drain()

        forwarding = asyncio.create_task(forward())
        try:
            while data := await to_redis_reader.read(1 << 20):
                if is_script and self.num_to_lose and not data.startswith(b"-NOSCRIPT"):
                    self.num_to_lose -= 1
                    self.num_lost += 1
                    break
                is_script = False
                writer.write(data)
                await writer.drain()
        finally:
            forwarding.cancel()
            for end in (writer, to_redis):
                end.close()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()
