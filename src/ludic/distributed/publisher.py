"""Publishers: new weights to an inference engine in this process or to a client. folder.py writes them to a folder.

`publish_gathered` reads the weights of a sharded model for any of them. Publishers to servers are in a plug-in.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ludic.distributed.ranks import RankFailed, Ranks
from ludic.models.lora import DenseWeight
from ludic.plugins import lazy
from ludic.types import ChatClient, ChecksServers, ConfigError, LudicError
from ludic.types import PolicyPublisher as PolicyPublisher  # the seeds name it here

if TYPE_CHECKING:
    from ludic_vllm.publish.broadcast import BroadcastPolicyPublisher as BroadcastPolicyPublisher

__getattr__ = lazy(__name__, {"ludic_vllm.publish.broadcast": "BroadcastPolicyPublisher"})  # the seeds name it here


class WeightPushError(LudicError, RuntimeError):
    """New weights did not reach every server. Always raised: the trainer must not continue as if they had."""


# --- inside this process --------------------------------------------------------------------------------------


class InPlaceServer(Protocol):
    """A server whose weights are changed in place, such as `LocalEngine`."""

    @property
    def model(self) -> Any:
        """The served model object."""
        ...

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Pauses generation while the weights change; a new version begins at the end."""
        ...


class SharedWeightsPublisher:
    """For `LocalEngine(model)` and `Trainer(model=model)` on one model object: no weights move, only the version changes."""

    def __init__(self, engine: InPlaceServer) -> None:
        self._engine = engine

    def require_shared(self, model: Any) -> None:
        """Raise unless inference engine and trainer share weights; two equal copies would drift apart at every step."""
        held = {id(parameter) for parameter in self._engine.model.parameters()}
        if not any(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad):
            raise ConfigError(
                "The inference engine of this SharedWeightsPublisher does not hold the trained model, so its samples would never "
                "change. Give LocalEngine and Trainer the same model object."
            )

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        """Begin a version; the weights are already in place."""
        with self._engine.updating(version):
            pass

    def updating(self, version: int | None = None) -> AbstractContextManager[None]:
        """Wrap the optimizer step, so that the inference engine never computes with half-updated weights."""
        return self._engine.updating(version)


class ClientPublisher:
    """Passes every new version to the client's `sync_weights`, for a client with its own copy of the weights, such as
    `LocalEngine(copy_of_the_model)` next to a sharded model."""

    def __init__(self, client: ChatClient, *, timeout_s: float = 600.0) -> None:
        self._client, self._timeout_s = client, timeout_s

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        self._client.sync_weights(state_dict, timeout_s=self._timeout_s, version=version)


class Rank0OnlyPublisher:
    """Creates the real publisher on rank 0 at first use; other ranks have none, and no connection."""

    def __init__(self, make_inner: Callable[[], PolicyPublisher], *, enabled: bool = True) -> None:
        """`enabled=False`: no rank publishes (a dry run)."""
        self._make_inner, self._enabled = make_inner, enabled
        self._inner: PolicyPublisher | None = None

    def publish(self, state_dict: Mapping[str, Any], version: int | None = None) -> None:
        if self._enabled and _process_rank() == 0:
            if self._inner is None:
                self._inner = self._make_inner()
            self._inner.publish(state_dict, version)

    def is_current(self, version: int) -> bool:
        """True if nothing has been published from here: then nothing can be lost."""
        return not isinstance(self._inner, ChecksServers) or self._inner.is_current(version)


def _process_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))  # torchrun sets it before a group exists


# --- from a sharded model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GatherRequest:
    """Rank 0's message to the others: a weight to gather, or the end."""

    name: str | None = None
    failure: str | None = None


class _GatheredWeights(Mapping[str, Tensor]):
    """All weights on rank 0, without ever holding all of them: each read gathers one weight from all ranks, and the caller owns
    the tensor. They may be read in any order and any number of times."""

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
    """Call `publish` on rank 0 with all of these weights; the other ranks gather with it, and fail if it fails."""
    by_name = {weight.name: weight for weight in weights}
    if not ranks.is_first:
        return _gather_until_closed(by_name, ranks)
    gathered = _GatheredWeights(by_name, ranks)
    try:
        publish(gathered)
    except RankFailed:
        raise
    except Exception as error:
        gathered.close(failure=f"{type(error).__name__}: {error}")
        raise
    gathered.close()


def _gather_until_closed(weights: Mapping[str, DenseWeight], ranks: Ranks) -> None:
    while True:
        request: _GatherRequest = ranks.broadcast(None)
        if request.failure is not None:
            raise RankFailed(f"Rank 0 could not publish: {request.failure}")
        if request.name is None:
            return
        weights[request.name].read()


InProcessPublisher = SharedWeightsPublisher
"""The documents' name for it: the embedded inference engine holds the trainer's own parameters."""
