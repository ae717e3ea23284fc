"""The weights of a sharded model as a mapping that is put together as it is read, so that no device ever holds all of it.

Only the first rank publishes. Whatever weight its publisher reads, in whatever order and however often, the other ranks
help to gather; they follow until it has finished.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ludic.distributed.ranks import RankFailed, Ranks
from ludic.models.lora import DenseWeight


@dataclass(frozen=True, slots=True)
class _GatherRequest:
    """What the first rank tells the others: a weight to gather, or that it has finished."""

    name: str | None = None
    failure: str | None = None


class GatheredWeights(Mapping[str, Tensor]):
    """On the first rank. A weight is gathered anew whenever it is read, and belongs to whoever has read it."""

    def __init__(self, weights: Mapping[str, DenseWeight], ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks
        self._is_open = True
        self._one_at_a_time = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        with self._one_at_a_time:
            if not self._is_open:
                raise RuntimeError(f"{name!r} was read after publishing had ended: nobody helps to gather it any more.")
            self._ranks.broadcast(_GatherRequest(name=name))
            return weight.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def close(self, failure: str | None = None) -> None:
        with self._one_at_a_time:
            self._is_open = False
            self._ranks.broadcast(_GatherRequest(failure=failure))


def publish_gathered(
    weights: Sequence[DenseWeight], ranks: Ranks, publish: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """`publish` on the first rank with all of these weights; the others help, and fail if it fails."""
    by_name = {weight.name: weight for weight in weights}
    if ranks.is_first:
        _publish(GatheredWeights(by_name, ranks), publish)
    else:
        _follow(by_name, ranks)


def _publish(gathered: GatheredWeights, publish: Callable[[Mapping[str, Tensor]], None]) -> None:
    try:
        publish(gathered)
    except RankFailed:
        raise
    except Exception as error:
        gathered.close(failure=f"{type(error).__name__}: {error}")
        raise
    gathered.close()


def _follow(weights: Mapping[str, DenseWeight], ranks: Ranks) -> None:
    while True:
        wish: _GatherRequest = ranks.broadcast(None)
        if wish.failure is not None:
            raise RankFailed(f"Rank 0 could not publish: {wish.failure}")
        if wish.name is None:
            return
        weights[wish.name].read()
