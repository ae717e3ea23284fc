"""`ReplayBatchSource`: a replay buffer with an age limit.

Each batch is a fresh batch of the inner source plus samples of earlier ones. The buffer stores a sample unchanged, with the
log-probs of the policy that sampled it and its original weight, so ratios and corrections work as on any stale sample. It
drops samples that are more than `max_lag` versions behind, and the oldest ones when it is full.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ludic.batch_gen.sources.wrapper import StoredItem, load_into, refuse_accounts, state_of, tell_version
from ludic.types import BatchSource, ConfigError, SAWBatch, SAWItem, derive_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    stored: StoredItem
    version: int
    """The oldest policy version of its tokens; if the sample names none, the trainer's version when it was added."""


class ReplayBatchSource:
    """Batches of `source`, each with `num_replayed` samples of earlier ones.

    `capacity` counts samples. `half_life` makes newer samples more likely: a sample that many versions older is half as likely;
    None draws uniformly. With `fresh_every=4`, three replay-only batches follow each fresh one.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        capacity: int,
        num_replayed: int,
        max_lag: int | None = None,
        half_life: float | None = None,
        fresh_every: int = 1,
        seed: int = 0,
    ) -> None:
        if capacity < 1 or num_replayed < 1 or fresh_every < 1:
            raise ConfigError(
                f"capacity={capacity}, num_replayed={num_replayed}, fresh_every={fresh_every}; each must be at least 1."
            )
        if max_lag is not None and max_lag < 0:
            raise ConfigError(f"max_lag={max_lag}; it must be 0 or more, or None for no limit.")
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life={half_life}; it must be above 0, or None to draw uniformly.")
        refuse_accounts("ReplayBatchSource", source)
        self._source = source
        self._capacity, self._num_replayed, self._fresh_every = capacity, num_replayed, fresh_every
        self._max_lag, self._half_life = max_lag, half_life
        self._seed = seed
        self._version = 0
        self._num_batches = 0
        self._kept: deque[_Kept] = deque()

    def __len__(self) -> int:
        """Samples in the buffer."""
        return len(self._kept)

    async def next_batch(self) -> SAWBatch:
        num_expired = self._drop_expired()
        is_fresh_due = self._num_batches % self._fresh_every == 0
        fresh = await self._source.next_batch() if is_fresh_due or not self._kept else SAWBatch(items=[])
        drawn = self._draw()
        self._keep(fresh.items)
        self._num_batches += 1
        counts = {"num_replayed": len(drawn), "num_kept": len(self._kept), "num_expired": num_expired}
        numbers: dict[str, float] = dict(counts)
        if drawn:
            numbers["replay_lag_mean"] = fmean(self._lag(kept) for kept in drawn)
        meta = {**fresh.meta, "source": "replay", **numbers}
        return SAWBatch(items=[*fresh.items, *(_replayed(kept.stored.item) for kept in drawn)], meta=meta)

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        """Set the version of the policy that is trained next."""
        self._version = version
        tell_version(self._source, version)

    # --- the buffer ---

    def _lag(self, kept: _Kept) -> int:
        return self._version - kept.version

    def _drop_expired(self) -> int:
        """Drop samples that are too old and return their number."""
        num_before = len(self._kept)
        if self._max_lag is not None:
            self._kept = deque(kept for kept in self._kept if self._lag(kept) <= self._max_lag)
        return num_before - len(self._kept)

    def _keep(self, items: Sequence[SAWItem]) -> None:
        for item in items:
            version = self._version if item.oldest_version is None else item.oldest_version
            self._kept.append(_Kept(stored=StoredItem(item), version=version))
        while len(self._kept) > self._capacity:
            self._kept.popleft()

    def _draw(self) -> list[_Kept]:
        """Draw without replacement. The seed depends on the batch number, so a resumed run draws the same."""
        rng = random.Random(derive_seed(self._seed, self._num_batches))
        # Gumbel top-k: the k largest values of log-weight plus noise are a weighted draw, and no weight underflows.
        keyed = [(self._log_weight(kept) - math.log(rng.expovariate(1.0)), kept) for kept in self._kept]
        keyed.sort(key=lambda pair: -pair[0])
        return [kept for _, kept in keyed[: self._num_replayed]]

    def _log_weight(self, kept: _Kept) -> float:
        return 0.0 if self._half_life is None else -math.log(2) * self._lag(kept) / self._half_life

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """Call it between batches. It includes the samples of the buffer, at most `capacity`."""
        return {
            "version": self._version,
            "num_batches": self._num_batches,
            "kept": [[kept.version, kept.stored.text] for kept in self._kept],
            "source": state_of(self._source),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version, self._num_batches = state["version"], state["num_batches"]
        kept = [_Kept(stored=StoredItem.read(text), version=version) for version, text in state["kept"]]
        self._kept = deque(kept[-self._capacity :])
        load_into(self._source, state["source"])


def _replayed(item: SAWItem) -> SAWItem:
    """Its siblings are not all here: filters that compare a group's members must not take some for the whole."""
    return item.with_origin(group_id=None, is_replayed=True)
