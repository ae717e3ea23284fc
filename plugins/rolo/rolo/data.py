"""The problems: batches of examples."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ludic.batch_gen.requests.dataset import EpochOrder
from ludic.batch_gen.requests.samples import read_samples
from ludic.types import ConfigError
from rolo.rl import Example


class DataLoader(Protocol):
    def batches(self) -> Iterator[list[Example]]: ...


class HuggingFaceDataLoader:
    """Endless shuffled epochs over a hub dataset (hub:NAME:SPLIT) or a JSON, JSONL or Parquet file."""

    def __init__(
        self,
        place: str | Path,
        *,
        batch_size: int,
        limit: int | None = None,
        keep: Callable[[Example], bool] = bool,
        seed: int = 0,
    ) -> None:
        """Uses the first `limit` examples for which `keep` is true."""
        if batch_size < 1 or (limit is not None and limit < 1):
            raise ConfigError(f"batch_size={batch_size}, limit={limit}: both are at least 1.")
        self.examples: Sequence[Example] = [row for row in read_samples(place) if keep(row)][:limit]
        self.batch_size = batch_size
        self.passes = EpochOrder(len(self.examples), shuffle=True, seed=seed)
        """Position, with `state_dict` and `load_state_dict`."""

    def batches(self) -> Iterator[list[Example]]:
        while True:
            yield [self.examples[self.passes.next_index()] for _ in range(self.batch_size)]
