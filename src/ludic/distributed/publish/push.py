"""Pushes weights to servers that hold their own copy: the order of an update, its retry and its check."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.distributed.publish.interfaces import ControlPlane, TensorCommunicator, WeightPushError
from ludic.inference.vllm.buckets import Bucket, WeightMetadata, checksum, describe, sampled, split_into_buckets
from ludic.types import ConfigError, LudicError

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20


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
    ) -> None:
        """`dtype`: floating-point weights are cast to it before sending (fp32 training, bf16 server: half the bytes)."""
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}; it must be at least 1, and {BUCKET_BYTES} is usual.")
        if comm.rank != src_rank:
            raise ConfigError(
                f"The weights come from rank {src_rank}, but this is rank {comm.rank}. Wrap the publisher in Rank0OnlyPublisher, "
                "which publishes from one rank."
            )
        self._control, self._comm, self._src_rank = control, comm, src_rank
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._lock = threading.Lock()

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
            try:
                self._push_or_retry(update)
            finally:
                self._comm.release()

    def is_current(self, version: int) -> bool:
        """Whether every server has this version from this publisher. A restarted or stopped server has not."""
        try:
            return self._control.has_version(version)
        except WeightPushError:
            return False

    def _push_or_retry(self, update: WeightUpdate) -> None:
        try:
            self._push(update)
        except ConfigError:
            self._control.abandon_update()
            raise
        except WeightPushError as first:
            logger.warning("pushing version %d failed, retrying once: %s", update.version, first)
            self._comm.release()
            self._push_again(update)

    def _push_again(self, update: WeightUpdate) -> None:
        try:
            self._control.require_fits(update.metadata)  # also waits for a restarting server
            self._push(update)
        except LudicError as error:
            advice = self._control.abandon_update()
            raise WeightPushError(
                f"Version {update.version} could not be published in two attempts. {error} {advice}"
            ) from error

    def _push(self, update: WeightUpdate) -> None:
        self._comm.stage(update.buckets, update.weights)
        self._control.announce_update_batch(update.metadata, update.version)
        for bucket in update.buckets:
            self._comm.broadcast(bucket, update.weights, self._src_rank)
        self._comm.barrier()
        self._control.finalize_update(update.version, update.checksums)
