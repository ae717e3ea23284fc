"""`MixedBatchSource`: builds each batch from several sources in given shares.

Each batch holds one whole batch of the first source, so that its fresh samples are trained on at once. Every other source
contributes its share of samples, counted over the whole run: if a ratio such as 8 to 3 does not divide evenly, some batches
have one sample more. Surplus samples of these sources wait for the next batch.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludic.batch_gen.sources.wrapper import StoredItem, load_into, refuse_accounts, state_of, tell_version
from ludic.types import BatchSource, ConfigError, RequestsExhausted, SAWBatch, SAWItem

_MAX_EMPTY = 16
"""Empty batches in a row after which a source counts as exhausted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPart:
    """One source of a mixture."""

    name: str
    """Prefix of its logged metrics."""
    source: BatchSource
    share: float
    """Relative number of its samples, compared with the shares of the other parts."""
    objective: str | None = None
    """Objective tag of its samples (see mix_objectives); None keeps their tags."""

    def __post_init__(self) -> None:
        if not (self.share > 0 and math.isfinite(self.share)):
            raise ConfigError(
                f"MixedPart {self.name!r} has share={self.share}; it must be above 0. To disable a part, leave it out."
            )
        refuse_accounts("MixedBatchSource", self.source)


class MixedBatchSource:
    """Whole batches of the first part, plus the share of samples of every other part."""

    def __init__(self, parts: Sequence[MixedPart]) -> None:
        names = [part.name for part in parts]
        if not parts or len(set(names)) != len(names):
            raise ConfigError(f"MixedBatchSource has the parts {names}; it needs at least one, with different names.")
        self._lead, *self._others = parts
        self._num_lead = 0
        """Samples of the first part so far."""
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
        # 1e-9 corrects shares such as 0.3 / 0.1, whose quotient is just below 3.
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
        """Call it between batches. It includes the waiting samples, less than one batch of each part."""
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
