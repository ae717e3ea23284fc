"""Publishers: new weights to an inference engine in this process, to a client, or to servers with their own copy.

`publish_gathered` reads the weights of a sharded model for any of them. Servers: publish/vllm.py, publish/adapter.py; a folder:
publish/folder.py.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ludic.distributed.interfaces import ControlPlane, KeepsWeights, TensorCommunicator, WeightPushError
from ludic.distributed.ranks import RankFailed, Ranks
from ludic.distributed.transfer import Bucket, WeightMetadata, checksum, describe, sampled, split_into_buckets
from ludic.models.lora import DenseWeight
from ludic.types import ChatClient, ChecksServers, ConfigError, LudicError, PolicyGone
from ludic.types import PolicyPublisher as PolicyPublisher  # the seeds name it here

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20


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
    `LocalEngine(copy_of_the_model)` beside a sharded model."""

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


# --- to servers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version to be pushed."""

    version: int
    weights: Mapping[str, Tensor]
    metadata: Sequence[WeightMetadata]
    buckets: Sequence[Bucket]
    checksums: Mapping[str, int]
    """Expected checksums of a sample of weights."""


class BroadcastPolicyPublisher:
    """`publish` returns when every server generates with the new weights, and raises if one does not."""

    def __init__(
        self,
        control: ControlPlane,
        comm: TensorCommunicator,
        src_rank: int = 0,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        attempts: int = 2,
    ) -> None:
        """`dtype`: floating-point weights are cast to it before sending (fp32 training, bf16 server: half the bytes).

        `attempts`: how often a push is tried before `publish` raises.
        """
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}; it must be at least 1, and {BUCKET_BYTES} is usual.")
        if comm.rank != src_rank:
            raise ConfigError(
                f"The weights come from rank {src_rank}, but this is rank {comm.rank}. Wrap the publisher in Rank0OnlyPublisher, "
                "which publishes from one rank."
            )
        self._control, self._comm, self._src_rank = control, comm, src_rank
        self._bucket_bytes, self._dtype, self._attempts = bucket_bytes, dtype, attempts
        self._lock = threading.Lock()
        self._last: WeightUpdate | None = None
        """What the servers have, without the weights themselves; None before the first push and after a failed one."""

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """Push all weights of the model, by transformers' names. `version` defaults to the servers' version plus one."""
        with self._lock:
            metadata = describe(state_dict, self._dtype)
            self._control.require_fits(metadata)
            buckets = split_into_buckets(metadata, self._bucket_bytes)
            compared = [part for bucket in buckets for part in sampled(bucket)]
            update = WeightUpdate(
                version=self._control.policy_version() + 1 if version is None else version,
                weights=state_dict,
                metadata=metadata,
                buckets=buckets,
                checksums={part.name: checksum(state_dict[part.name].to(part.torch_dtype)) for part in compared},
            )
            self._last = None
            try:
                self._push_or_retry(update)
            finally:
                self._comm.release()
            self._last = replace(update, weights={})

    def publish_again(self) -> bool:
        """Send the last version to servers that were restarted, from the bytes that the communicator has kept: the trainer's
        weights may be changing. False if there is no such version, because none was sent or sending the next one failed.
        """
        if not isinstance(self._comm, KeepsWeights):
            raise ConfigError(f"{type(self._comm).__name__} keeps no weights; publish them again.")
        with self._lock:
            if self._last is None:
                return False
            if not self._control.has_version(self._last.version):
                self._control.require_fits(self._last.metadata)
                self._send(self._last)
            return True

    def is_current(self, version: int) -> bool:
        """Whether every server has this version from this publisher. A restarted or stopped server has not."""
        try:
            return self._control.has_version(version)
        except WeightPushError:
            return False

    def _push_or_retry(self, update: WeightUpdate) -> None:
        for attempt in range(1, self._attempts + 1):
            try:
                if attempt > 1:
                    self._control.require_fits(update.metadata)  # also waits for a restarting server
                self._comm.stage(update.buckets, update.weights)
                return self._send(update)
            except PolicyGone:
                raise
            except LudicError as error:
                if isinstance(error, WeightPushError) and attempt < self._attempts:
                    logger.warning("pushing version %d failed, retrying: %s", update.version, error)
                    self._comm.release()
                    continue
                advice = self._control.abandon_update()
                if attempt == 1 and isinstance(error, ConfigError):
                    raise
                raise WeightPushError(
                    f"Version {update.version} could not be published in {attempt} attempts. {error} {advice}"
                ) from error

    def _send(self, update: WeightUpdate) -> None:
        self._control.announce_update_batch(update.metadata, update.version)
        for bucket in update.buckets:
            self._comm.broadcast(bucket, update.weights, self._src_rank)
        self._comm.barrier()
        self._control.finalize_update(update.version, update.checksums)


# --- from a sharded model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GatherRequest:
    """Rank 0's message to the others: a weight to gather, or the end."""

    name: str | None = None
    failure: str | None = None


class GatheredWeights(Mapping[str, Tensor]):
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
    gathered = GatheredWeights(by_name, ranks)
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
