"""The weights of a sharded model as a lazy mapping, so that no device ever holds all of them.

Only rank 0 publishes. For each weight that its publisher reads, in any order and any number of times, the other ranks join
the gathering; they follow until rank 0 has finished.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ludic.distributed.ranks import RankFailed, Ranks
from ludic.models.lora import DenseWeight


@dataclass(frozen=True, slots=True)
class _GatherRequest:
    """Rank 0's message to the others: a weight to gather, or the end."""

    name: str | None = None
    failure: str | None = None


class GatheredWeights(Mapping[str, Tensor]):
    """The mapping on rank 0. Each read gathers the weight again; the caller owns the tensor."""

    def __init__(self, weights: Mapping[str, DenseWeight], ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks
        self._is_open = True
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        with self._lock:
            if not self._is_open:
                raise RuntimeError(f"{name!r} was read after publishing had ended; the other ranks no longer gather.")
            self._ranks.broadcast(_GatherRequest(name=name))
            return weight.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def close(self, failure: str | None = None) -> None:
        with self._lock:
            self._is_open = False
            self._ranks.broadcast(_GatherRequest(failure=failure))


def publish_gathered(
    weights: Sequence[DenseWeight], ranks: Ranks, publish: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Call `publish` on rank 0 with all of these weights; the other ranks join, and fail if it fails."""
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
        request: _GatherRequest = ranks.broadcast(None)
        if request.failure is not None:
            raise RankFailed(f"Rank 0 could not publish: {request.failure}")
        if request.name is None:
            return
        weights[request.name].read()
