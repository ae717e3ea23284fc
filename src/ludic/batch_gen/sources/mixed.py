"""`MixedBatchSource`: one batch from several sources, in given shares.

The first source sets the pace: each batch holds one whole batch of it, so what it samples is trained on at once. Of every
other source there are as many samples as its share asks for, counted over the whole run: where 8 to 3 does not come out
even, one batch has a sample more. What another source has brought too many of waits for the next batch.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludic.batch_gen.sources.wrapper import StoredItem, load_into, refuse_accounts, state_of, tell_version
from ludic.types import BatchSource, ConfigError, RequestsExhausted, SAWBatch, SAWItem

_MAX_EMPTY = 16
"""Batches without a sample that one source may give in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPart:
    """One source of a mixture."""

    name: str
    """Of the source; numbers about it are logged under it."""
    source: BatchSource
    share: float
    """How many of its samples there are, in proportion to the other parts' shares."""
    objective: str | None = None
    """What its samples are trained for (see mix_objectives); None leaves the objectives that they have."""

    def __post_init__(self) -> None:
        if not (self.share > 0 and math.isfinite(self.share)):
            raise ConfigError(
                f"MixedPart {self.name!r} has share={self.share}; it must be above 0. Leave the part out."
            )
        refuse_accounts("MixedBatchSource", self.source)


class MixedBatchSource:
    """Whole batches of the first part, and of every other part its share of samples."""

    def __init__(self, parts: Sequence[MixedPart]) -> None:
        names = [part.name for part in parts]
        if not parts or len(set(names)) != len(names):
            raise ConfigError(f"MixedBatchSource has the parts {names}; it needs one at least, and each name once.")
        self._lead, *self._others = parts
        self._num_lead = 0
        """Samples that the first part has given."""
        self._num_given = {part.name: 0 for part in self._others}
        self._waiting: dict[str, deque[StoredItem]] = {part.name: deque() for part in self._others}

    async def next_batch(self) -> SAWBatch:
        batch = await self._lead.source.next_batch()
        taken = {self._lead.name: _tagged(batch.items, self._lead)}
        self._num_lead += len(batch.items)
        for part in self._others:
            taken[part.name] = _tagged(await self._take(part, self._num_due(part)), part)
        counts = {f"{name}/num_mixed": len(items) for name, items in taken.items()}
        meta = {**batch.meta, "source": "mixed", **counts}
        return SAWBatch(items=[item for items in taken.values() for item in items], meta=meta)

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        for part in (self._lead, *self._others):
            tell_version(part.source, version)

    def _num_due(self, part: MixedPart) -> int:
        # The small number is for shares such as 0.3 / 0.1, whose quotient is just below 3.
        wanted = math.floor(self._num_lead * part.share / self._lead.share + 1e-9)
        return wanted - self._num_given[part.name]

    async def _take(self, part: MixedPart, count: int) -> list[SAWItem]:
        waiting = self._waiting[part.name]
        num_empty = 0
        while len(waiting) < count:
            brought = (await part.source.next_batch()).items
            waiting += map(StoredItem, brought)
            num_empty = 0 if brought else num_empty + 1
            if num_empty == _MAX_EMPTY:
                raise RequestsExhausted(f"The part {part.name!r} gave {_MAX_EMPTY} batches in a row without a sample.")
        self._num_given[part.name] += count
        return [waiting.popleft().item for _ in range(count)]

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """Take it between batches. It holds the samples that wait: less than one batch of each part."""
        return {
            "num_lead": self._num_lead,
            "num_given": dict(self._num_given),
            "waiting": {name: [stored.text for stored in waiting] for name, waiting in self._waiting.items()},
            "sources": {part.name: state_of(part.source) for part in (self._lead, *self._others)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {part.name for part in (self._lead, *self._others)}
        if names != state["sources"].keys():
            raise ConfigError(
                f"The saved mixture has the parts {sorted(state['sources'])}, this one {sorted(names)}. Resume with the parts "
                "that the run was started with."
            )
        self._num_lead, self._num_given = state["num_lead"], dict(state["num_given"])
        self._waiting = {name: deque(map(StoredItem.read, texts)) for name, texts in state["waiting"].items()}
        for part in (self._lead, *self._others):
            load_into(part.source, state["sources"][part.name])


def _tagged(items: Sequence[SAWItem], part: MixedPart) -> list[SAWItem]:
    return list(items) if part.objective is None else [item.with_origin(objective=part.objective) for item in items]
