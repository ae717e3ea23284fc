"""`StragglerRunner`: a batch closes when a share of its episodes is done; the others continue while it is trained on.

Groups stay whole: a batch holds every episode of a group or none. An unfinished group counts for the next batch, which draws
that many fewer new groups; its episodes continue with the new weights, and their traces record which version sampled which token.
A group that was carried `max_carries` times is waited for, so that no sample is older than that. Every group is in one batch
exactly: a checkpoint names the unfinished ones, and a resumed run plays them again from their start, with their seeds and numbers.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ludic.batch_gen.engine import RolloutEngine
from ludic.batch_gen.episodes import Episode, EpisodeLimits
from ludic.batch_gen.requests.groups import PlacedGroup, RequestStream
from ludic.tasks import cancel_all
from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """When a batch closes."""

    close_at: float = 0.9
    """Share of its episodes, in whole groups."""
    max_carries: int = 1
    """Batches into which an unfinished group may be carried; the last one waits for it."""

    def __post_init__(self) -> None:
        if not 0 < self.close_at <= 1:
            raise ConfigError(f"close_at={self.close_at}; it is a share of the episodes, above 0 and at most 1.")
        if self.max_carries < 1:
            raise ConfigError(
                f"max_carries={self.max_carries}; an unfinished group goes into one later batch at least."
            )


@dataclass(kw_only=True, slots=True)
class _Group:
    placed: PlacedGroup
    first_index: int
    num_carries: int = 0
    episodes: list[Episode] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(request.num_episodes for request in self.placed.requests)

    @property
    def is_done(self) -> bool:
        return len(self.episodes) == self.size


class StragglerRunner:
    """Runs the episodes of request groups in the background and numbers them over the whole run."""

    def __init__(
        self,
        engine: RolloutEngine,
        settings: Stragglers,
        *,
        max_steps: int,
        timeout_s: float | None = None,
        concurrency: int = 8,
    ) -> None:
        EpisodeLimits(max_steps=max_steps, timeout_s=timeout_s)  # checks the limits before the first batch
        self._stream = partial(engine.stream_episodes, max_steps=max_steps, timeout_s=timeout_s)
        self._settings, self._concurrency = settings, concurrency
        self.num_episodes = 0
        self._groups: list[_Group] = []
        """Begun and not in a batch yet, in the order of their numbers."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The stream of their episodes; None before they start."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set when a group is done, or a task has ended."""

    @property
    def num_carried(self) -> int:
        """Groups that the next batch has already."""
        return len(self._groups)

    async def run(self, new: Sequence[PlacedGroup]) -> tuple[list[Episode], dict[str, int]]:
        """The episodes of a batch, in the order of their numbers, and counts: those from earlier batches, those carried on."""
        if (
            self._loop is not asyncio.get_running_loop()
        ):  # the first batch, or after a resume, or in a second event loop
            self._loop, self._tasks, self._changed = asyncio.get_running_loop(), set(), asyncio.Event()
            for group in self._groups:
                group.episodes = []
            self._begin(self._groups)
        added = []
        for placed in new:
            added.append(_Group(placed=placed, first_index=self.num_episodes))
            self.num_episodes += added[-1].size
        self._begin(added)
        self._groups = [*self._groups, *added]  # a new list: tasks hold the old one
        while not self._may_close():
            self._changed.clear()
            self._raise_errors()
            await self._changed.wait()
        self._raise_errors()
        done = [group for group in self._groups if group.is_done]
        self._groups = [group for group in self._groups if not group.is_done]
        for group in self._groups:
            group.num_carries += 1
        counts = {
            "num_from_earlier": sum(group.size for group in done if group.num_carries),
            "num_carried": sum(group.size for group in self._groups),
        }
        episodes = [episode for group in done for episode in group.episodes]
        return sorted(episodes, key=lambda episode: episode.plan.index), counts

    async def close(self) -> None:
        """Cancel the unfinished episodes; if it runs again, it plays their groups from the start."""
        tasks, self._tasks, self._loop = self._tasks, set(), None
        await cancel_all(tasks)

    # --- internals ---

    def _may_close(self) -> bool:
        num_done = sum(group.size for group in self._groups if group.is_done)
        is_overdue = any(g.num_carries >= self._settings.max_carries and not g.is_done for g in self._groups)
        # 1e-9: 0.9 * 10 is just above 9 in some orders of operations.
        is_enough = num_done + 1e-9 >= self._settings.close_at * sum(group.size for group in self._groups)
        return is_enough and not is_overdue

    def _begin(self, groups: Sequence[_Group]) -> None:
        if not groups:
            return
        unfinished = sum(group.size - len(group.episodes) for group in self._groups if group not in groups)
        task = asyncio.create_task(self._play(groups, max(1, self._concurrency - unfinished)), name="play a batch")
        task.add_done_callback(lambda _: self._changed.set())
        self._tasks.add(task)

    async def _play(self, groups: Sequence[_Group], concurrency: int) -> None:
        owner: dict[int, _Group] = {}
        numbers: list[int] = []
        for group in groups:
            number = group.first_index
            for request in group.placed.requests:
                numbers.append(number)
                owner |= dict.fromkeys(range(number, number + request.num_episodes), group)
                number += request.num_episodes
        requests = [request for group in groups for request in group.placed.requests]
        async with aclosing(self._stream(requests, concurrency=concurrency, first_index=numbers)) as stream:
            async for episode in stream:
                group = owner[episode.plan.index]
                group.episodes.append(episode)
                if group.is_done:
                    self._changed.set()

    def _raise_errors(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """The groups that are in no batch yet, by their places in the stream of requests."""
        carried = [
            {
                "before": group.placed.before,
                "index": group.placed.index,
                "first_index": group.first_index,
                "num_carries": group.num_carries,
            }
            for group in self._groups
        ]
        return {"carried": carried}

    def load_state_dict(self, state: dict[str, Any], requests: RequestStream) -> None:
        """`requests` draws the unfinished groups again."""
        if self._tasks:
            raise ConfigError("Load the state before the first next_batch; episodes are running already.")
        self._loop = None
        self._groups = [
            _Group(
                placed=requests.take_again(saved["before"], saved["index"]),
                first_index=saved["first_index"],
                num_carries=saved["num_carries"],
            )
            for saved in state["carried"]
        ]
