"""`BroadcastPolicyPublisher`: pushes every version to servers with their own copy of the weights; every push is checked."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ludic.distributed.publisher import WeightPushError
from ludic.types import ConfigError, LudicError, PolicyGone
from ludic_vllm.publish.transfer import Bucket, WeightMetadata, checksum, describe, sampled, split_into_buckets


class ControlPlane(Protocol):
    """Directs the servers of the policy through an update; every failure is a WeightPushError."""

    def policy_version(self) -> int:
        """The lowest version of all servers."""
        ...

    def has_version(self, version: int) -> bool:
        """Return True if every server has exactly this version, and none has restarted since."""
        ...

    def require_fits(self, metadata: Sequence[WeightMetadata]) -> None:
        """Raise ConfigError if these are not the served model's weights. Changes nothing and does not pause generation."""
        ...

    def announce_update_batch(self, metadata: Sequence[WeightMetadata], version: int) -> None:
        """Pause all servers at a token boundary and prepare them for these weights."""
        ...

    def finalize_update(self, version: int, checksums: Mapping[str, int]) -> None:
        """After all servers have loaded: compare the checksums, begin the version, resume generation."""
        ...

    def abandon_update(self) -> str:
        """Give up the update; returns the servers' state and what to do, as a sentence."""
        ...


class TensorCommunicator(Protocol):
    """Sends the bytes of one update."""

    @property
    def rank(self) -> int: ...

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        """Work that needs no pause: write files, fill buffers, connect."""
        ...

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        """Send one bucket to every server, in the order of the buckets."""
        ...

    def barrier(self) -> None:
        """Returns when the servers have loaded everything that was sent."""
        ...

    def release(self) -> None:
        """After the update, also a failed one: free files, buffers and connections."""
        ...


@runtime_checkable
class _KeepsWeights(TensorCommunicator, Protocol):
    """A communicator whose `broadcast` can be called again after `release`, without `stage`: it still has the last bytes."""

    keeps_weights: bool


logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _WeightUpdate:
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
        self._last: _WeightUpdate | None = None
        """The update that the servers have, without the weights themselves; None before the first push and after a failed one."""

    def publish(self, state_dict: Mapping[str, Tensor], version: int | None = None) -> None:
        """Push all weights of the model, by transformers' names. `version` defaults to the servers' version plus one."""
        with self._lock:
            metadata = describe(state_dict, self._dtype)
            self._control.require_fits(metadata)
            buckets = split_into_buckets(metadata, self._bucket_bytes)
            compared = [part for bucket in buckets for part in sampled(bucket)]
            update = _WeightUpdate(
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
        if not isinstance(self._comm, _KeepsWeights):
            raise ConfigError(f"{type(self._comm).__name__} keeps no weights; publish them again.")
        with self._lock:
            if self._last is None:
                return False
            if not self._control.has_version(self._last.version):
                self._control.require_fits(self._last.metadata)
                self._send(self._last)
            return True

    def is_current(self, version: int) -> bool:
        """Return True if every server has this version from this publisher. A restarted or stopped server has not."""
        try:
            return self._control.has_version(version)
        except WeightPushError:
            return False

    def _push_or_retry(self, update: _WeightUpdate) -> None:
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

    def _send(self, update: _WeightUpdate) -> None:
        self._control.announce_update_batch(update.metadata, update.version)
        for bucket in update.buckets:
            self._comm.broadcast(bucket, update.weights, self._src_rank)
        self._comm.barrier()
        self._control.finalize_update(update.version, update.checksums)
