"""What a push of weights needs from others: somebody who directs the servers, and something that carries the bytes."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ludic.inference.vllm.buckets import Bucket, WeightMetadata
from ludic.types import LudicError
from ludic.types import PolicyPublisher as PolicyPublisher  # the seeds name it here


class WeightPushError(LudicError, RuntimeError):
    """New weights did not reach every server. It is never silent: the trainer must not go on as if they had."""


class ControlPlane(Protocol):
    """Directs whatever serves the policy through an update; everything that fails is a WeightPushError."""

    def policy_version(self) -> int:
        """The version that every server has at least."""
        ...

    def has_version(self, version: int) -> bool:
        """Whether every server was given exactly this version, and none has forgotten it."""
        ...

    def require_fits(self, metadata: Sequence[WeightMetadata]) -> None:
        """ConfigError if these are not the served model's weights. Nothing changes and nobody stands still for it."""
        ...

    def announce_update_batch(self, metadata: Sequence[WeightMetadata], version: int) -> None:
        """Everybody stands still at a token boundary and expects these weights."""
        ...

    def finalize_update(self, version: int, checksums: Mapping[str, int]) -> None:
        """Everybody has loaded; what arrived is compared; the version begins; generation goes on."""
        ...

    def abandon_update(self) -> str:
        """The update has failed for good: in which state the servers are, and what to do, as a sentence."""
        ...


class TensorCommunicator(Protocol):
    """Carries the bytes of one update."""

    @property
    def rank(self) -> int: ...

    def stage(self, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]) -> None:
        """Whatever can be done while the servers still generate: write a file, fill a buffer, meet."""
        ...

    def broadcast(self, bucket: Bucket, weights: Mapping[str, Tensor], src_rank: int) -> None:
        """One bucket to every server, in the order of the buckets."""
        ...

    def barrier(self) -> None:
        """Returns when everything that was sent has been taken."""
        ...

    def release(self) -> None:
        """After the update, also a failed one: files, buffers and connections go."""
        ...
